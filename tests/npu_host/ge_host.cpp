/* The one class of the graph engine that torchair's conversion needs: a text. Everything else is a stand-in. */
#include <memory>
#include <string>

#include "graph/ascend_string.h"
#include "graph/operator_factory.h"

namespace ge {

AscendString::AscendString(const char_t *const name) {
  if (name != nullptr) name_ = std::make_shared<std::string>(name);
}

const char_t *AscendString::GetString() const { return name_ == nullptr ? "" : name_->c_str(); }

bool AscendString::operator<(const AscendString &other) const {
  return std::string(GetString()) < other.GetString();
}

bool AscendString::operator==(const AscendString &other) const {
  return std::string(GetString()) == other.GetString();
}

AscendString GEGetErrorMsgHost() { return AscendString(""); }

}  // namespace ge
