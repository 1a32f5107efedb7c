#pragma once

#include <nanobind/nanobind.h>

// Adds PrefixTree to the module.
void bind_prefix_tree(nanobind::module_& module);
