#include "prefix_tree_bindings.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

#include "prefix_tree.h"

namespace nb = nanobind;
using namespace nb::literals;
using banaserve::PrefixTree;

namespace {

std::string_view view(const nb::bytes& text) { return {text.c_str(), text.size()}; }

std::string_view view(const nb::str& text) {
  Py_ssize_t size = 0;
  const char* const start = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (start == nullptr) throw nb::python_error();
  return {start, static_cast<std::size_t>(size)};
}

void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

// A tree, and the names of its targets as Python has them: what a match returns is looked up in
// dictionaries, and a string that is known is found there without being hashed or compared.
class NamedTree {
 public:
  NamedTree(std::size_t unit_bytes, std::size_t max_target_bytes, std::size_t max_bytes,
            bool is_fifo)
      : tree_(unit_bytes, max_target_bytes, max_bytes, is_fifo) {}

  void add(const nb::bytes& prompt, const nb::str& target) {
    const auto number = tree_.add(view(prompt), view(target));
    if (!number) return;
    if (*number >= names_.size()) names_.resize(*number + 1);
    names_[*number] = target;
  }

  nb::dict match(const nb::bytes& prompt, double tokens_per_unit) {
    require(tokens_per_unit >= 0, "tokens_per_unit is negative");
    constexpr double most = 1e15;  // whole as a double, and as a size
    matched_ = prompt;
    nb::dict matched;
    std::size_t last = 0;
    nb::object tokens;  // of all targets that have as many
    for (const auto& [target, num_units] : tree_.match(view(prompt))) {
      const auto num_tokens = static_cast<std::size_t>(
          std::min(most, static_cast<double>(num_units) * tokens_per_unit));
      if (num_tokens == 0) continue;
      if (num_tokens != last) tokens = nb::int_(last = num_tokens);
      matched[names_[target]] = tokens;
    }
    return matched;
  }

  nb::list dump() const {
    nb::list entries;
    for (const auto& entry : tree_.dump()) {
      nb::dict stamps;
      for (const auto& [target, stamp] : entry.stamps) stamps[names_[target]] = stamp;
      entries.append(
          nb::make_tuple(entry.depth, nb::bytes(entry.label.data(), entry.label.size()), stamps));
    }
    return entries;
  }

  void trim(const nb::bytes& prompt, const nb::str& target, std::size_t num_units) {
    tree_.trim(view(prompt), view(target), num_units);
  }

  void forget(const nb::str& target) { tree_.forget(view(target)); }
  std::size_t target_bytes(const nb::str& target) const { return tree_.target_bytes(view(target)); }
  std::size_t num_bytes() const { return tree_.num_bytes(); }
  std::size_t num_nodes() const { return tree_.num_nodes(); }

 private:
  PrefixTree tree_;
  std::vector<nb::object> names_;  // by number; of a number that is free: whoever had it last
  nb::object matched_;             // the prompt of the last match, whose bytes the tree looks at
};

void make(NamedTree* self, std::size_t unit_bytes, std::size_t max_target_bytes,
          std::size_t max_bytes, bool is_fifo) {
  require(unit_bytes == 1 || unit_bytes == 2 || unit_bytes == 4 || unit_bytes == 8,
          "unit_bytes is not 1, 2, 4 or 8");
  new (self) NamedTree(unit_bytes, max_target_bytes, max_bytes, is_fifo);
}

}  // namespace

void bind_prefix_tree(nb::module_& module) {
  nb::class_<NamedTree>(module, "PrefixTree",
                        "See banaserve_route.policies.prefixes.tree.PrefixTree.")
      .def("__init__", &make, "unit_bytes"_a, "max_target_bytes"_a, "max_bytes"_a,
           "is_fifo"_a = false)
      .def("add", &NamedTree::add, "prompt"_a, "target"_a)
      .def("match", &NamedTree::match, "prompt"_a, "tokens_per_unit"_a = 1.0)
      .def("trim", &NamedTree::trim, "prompt"_a, "target"_a, "num_units"_a)
      .def("forget", &NamedTree::forget, "target"_a)
      .def("dump", &NamedTree::dump)
      .def("target_bytes", &NamedTree::target_bytes, "target"_a)
      .def_prop_ro("num_bytes", &NamedTree::num_bytes)
      .def_prop_ro("num_nodes", &NamedTree::num_nodes);
}
