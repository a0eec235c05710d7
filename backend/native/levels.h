// Choosing the instruction set.
#pragma once

#include <string>
#include <vector>

namespace mtp {

// Names of the levels that were compiled and that this machine runs, best first.
std::vector<std::string> available_levels();

// Returns false if the level is not available. Not for use while kernels run.
bool use_level(const std::string& name);

}  // namespace mtp
