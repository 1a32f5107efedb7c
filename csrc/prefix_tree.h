// A compressed radix tree over prompts: which target was sent which prompts. No framework.
//
// What it means is told by PrefixTree in route/banaserve_route/policies/prefixes/tree.py, and once
// more, slowly, by the reference beside it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace banaserve {

class PrefixTree {
 public:
  using Target = std::uint32_t;

  // Charged for each node and target beside the label.
  static constexpr std::size_t kEntryBytes = 256;

  struct Stamp {
    Target target;
    std::uint64_t stamp;
  };

  struct Entry {
    std::size_t depth;
    std::string_view label;  // valid until the tree changes
    std::vector<Stamp> stamps;
  };

  struct Match {
    Target target;
    std::size_t num_units;
  };

  PrefixTree(std::size_t unit_bytes, std::size_t max_target_bytes, std::size_t max_bytes,
             bool is_fifo);
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // Returns the target's number, which stays its own as long as the tree has anything of it; no
  // number where the prompt is too short to keep.
  std::optional<Target> add(std::string_view prompt, std::string_view target);
  // The bytes of `prompt` have to stay as they are until the next match: an add of the same bytes
  // that comes next does not compare them again.
  std::vector<Match> match(std::string_view prompt);
  void trim(std::string_view prompt, std::string_view target, std::size_t num_units);
  void forget(std::string_view target);
  std::vector<Entry> dump() const;

  const std::string& name(Target target) const { return names_[target]; }
  std::size_t target_bytes(std::string_view target) const;
  std::size_t num_bytes() const noexcept { return num_bytes_; }
  std::size_t num_nodes() const noexcept { return num_nodes_; }

 private:
  struct Node;
  using Leaves = std::set<std::pair<std::uint64_t, Node*>>;

  // A target in a node.
  struct Held {
    Target target;
    std::uint32_t num_children;  // of the node's children that hold the target too
    std::uint64_t stamp;
  };

  struct Node {
    std::string label;
    Node* parent = nullptr;
    std::unordered_map<std::uint64_t, std::unique_ptr<Node>> children;
    std::vector<Held> held;  // by target

    Held* find(Target target);
    const Held* find(Target target) const;
  };

  // A node on the way of a prompt, and how many bytes of its label are the prompt's.
  struct Step {
    Node* node;
    std::size_t same;
  };

  std::uint64_t first_unit(std::string_view text) const;
  std::size_t common(std::string_view one, std::string_view other) const;
  Node* child_of(const Node& node, std::string_view rest) const;
  Target intern(std::string_view target);
  const Target* known(std::string_view target) const;

  void walk(std::string_view prompt);
  Node* split(Node* node, std::size_t at);
  void hold(Node* node, Target target);
  void add_leaf(Node* node, Target target);
  void take(Node* node, Target target);
  void take_leaf(Node* node, Target target);
  void shrink(Target target);
  void shrink_split();
  void shrink_all();
  void release_name(Target target);

  const std::size_t unit_bytes_;
  const std::size_t max_target_bytes_;
  const std::size_t max_bytes_;
  const bool is_fifo_;
  Node root_;
  std::uint64_t num_adds_ = 0;
  std::size_t num_bytes_ = 0;
  std::size_t num_nodes_ = 0;
  std::vector<std::string> names_;  // of a free target: empty
  std::vector<Target> free_;
  std::unordered_map<std::string, Target> targets_;
  std::vector<std::size_t> target_bytes_;
  std::vector<Leaves> leaves_;
  std::vector<Target> split_;  // targets that the last split charged
  std::string_view matched_;   // by the last match; empty if the tree has changed since
  std::vector<Step> way_;      // of that prompt
};

}  // namespace banaserve
