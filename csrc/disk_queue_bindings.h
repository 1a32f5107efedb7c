#pragma once

#include <nanobind/nanobind.h>

// Adds DiskQueue to the module.
void bind_disk_queue(nanobind::module_& module);
