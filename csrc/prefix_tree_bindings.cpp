#include "prefix_tree_bindings.h"

#include <nanobind/stl/string_view.h>

#include <string_view>

#include "prefix_tree.h"

namespace nb = nanobind;
using namespace nb::literals;
using banaserve::PrefixTree;

namespace {

std::string_view view(const nb::bytes& text) { return {text.c_str(), text.size()}; }

nb::str text(const std::string& name) { return nb::str(name.data(), name.size()); }

void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

void make(PrefixTree* self, std::size_t unit_bytes, std::size_t max_target_bytes,
          std::size_t max_bytes, bool is_fifo) {
  require(unit_bytes == 1 || unit_bytes == 2 || unit_bytes == 4 || unit_bytes == 8,
          "unit_bytes is not 1, 2, 4 or 8");
  new (self) PrefixTree(unit_bytes, max_target_bytes, max_bytes, is_fifo);
}

nb::dict match(const PrefixTree& self, const nb::bytes& prompt) {
  nb::dict matched;
  for (const auto& [target, num_units] : self.match(view(prompt)))
    matched[text(self.name(target))] = num_units;
  return matched;
}

nb::list dump(const PrefixTree& self) {
  const nb::object entry_of =
      nb::module_::import_("banaserve.orchestrator.replicas.prefix_tree").attr("TreeEntry");
  nb::list entries;
  for (const auto& entry : self.dump()) {
    nb::dict stamps;
    for (const auto& [target, stamp] : entry.stamps) stamps[text(self.name(target))] = stamp;
    entries.append(
        entry_of(entry.depth, nb::bytes(entry.label.data(), entry.label.size()), stamps));
  }
  return entries;
}

}  // namespace

void bind_prefix_tree(nb::module_& module) {
  nb::class_<PrefixTree>(module, "PrefixTree",
                         "See banaserve.orchestrator.replicas.prefix_tree.PrefixTree.")
      .def("__init__", &make, "unit_bytes"_a, "max_target_bytes"_a, "max_bytes"_a,
           "is_fifo"_a = false)
      .def(
          "add",
          [](PrefixTree& self, const nb::bytes& prompt, std::string_view target) {
            self.add(view(prompt), target);
          },
          "prompt"_a, "target"_a)
      .def("match", &match, "prompt"_a)
      .def(
          "trim",
          [](PrefixTree& self, const nb::bytes& prompt, std::string_view target,
             std::size_t num_units) { self.trim(view(prompt), target, num_units); },
          "prompt"_a, "target"_a, "num_units"_a)
      .def("forget", &PrefixTree::forget, "target"_a)
      .def("dump", &dump)
      .def("target_bytes", &PrefixTree::target_bytes, "target"_a)
      .def_prop_ro("num_bytes", &PrefixTree::num_bytes)
      .def_prop_ro("num_nodes", &PrefixTree::num_nodes);
}
