// Parts of the module that other sources bind.
#pragma once

#include <pybind11/pybind11.h>

namespace mtp {

void bind_elementwise(pybind11::module_& module);
void bind_attention(pybind11::module_& module);

}  // namespace mtp
