#pragma once

#include <nanobind/nanobind.h>

// Adds Line and request_costs to the module.
void bind_latency(nanobind::module_& module);
