#include "prefix_tree.h"

#include <algorithm>
#include <cstring>

namespace banaserve {

namespace {

constexpr auto by_target = [](const auto& held, PrefixTree::Target target) {
  return held.target < target;
};

}  // namespace

PrefixTree::PrefixTree(std::size_t unit_bytes, std::size_t max_target_bytes, std::size_t max_bytes,
                       bool is_fifo)
    : unit_bytes_(unit_bytes),
      max_target_bytes_(max_target_bytes),
      max_bytes_(max_bytes),
      is_fifo_(is_fifo) {}

PrefixTree::~PrefixTree() {
  // A path may be as deep as a prompt is long: destructors that call each other would use up the
  // stack.
  std::vector<std::unique_ptr<Node>> waiting;
  const auto orphan = [&waiting](Node& node) {
    for (auto& [first, child] : node.children) waiting.push_back(std::move(child));
    node.children.clear();
  };
  orphan(root_);
  while (!waiting.empty()) {
    const std::unique_ptr<Node> node = std::move(waiting.back());
    waiting.pop_back();
    orphan(*node);
  }
}

PrefixTree::Held* PrefixTree::Node::find(Target target) {
  const auto at = std::lower_bound(held.begin(), held.end(), target, by_target);
  return at != held.end() && at->target == target ? &*at : nullptr;
}

const PrefixTree::Held* PrefixTree::Node::find(Target target) const {
  return const_cast<Node*>(this)->find(target);
}

std::uint64_t PrefixTree::first_unit(std::string_view text) const {
  std::uint64_t unit = 0;
  std::memcpy(&unit, text.data(), unit_bytes_);
  return unit;
}

std::size_t PrefixTree::common(std::string_view one, std::string_view other) const {
  const std::size_t length = std::min(one.size(), other.size());
  // memcmp in strides is several times as fast as comparing byte by byte.
  std::size_t same = 0;
  for (const std::size_t stride : {std::size_t{4096}, std::size_t{256}, std::size_t{16}})
    while (same + stride <= length &&
           std::memcmp(one.data() + same, other.data() + same, stride) == 0)
      same += stride;
  while (same < length && one[same] == other[same]) ++same;
  return same - same % unit_bytes_;
}

PrefixTree::Node* PrefixTree::child_of(const Node& node, std::string_view rest) const {
  if (rest.size() < unit_bytes_) return nullptr;
  const auto at = node.children.find(first_unit(rest));
  return at == node.children.end() ? nullptr : at->second.get();
}

PrefixTree::Target PrefixTree::intern(std::string_view target) {
  const std::string name(target);
  const auto at = targets_.find(name);
  if (at != targets_.end()) return at->second;
  Target id;
  if (free_.empty()) {
    id = static_cast<Target>(names_.size());
    names_.push_back(name);
    target_bytes_.push_back(0);
    leaves_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
    names_[id] = name;
  }
  targets_.emplace(name, id);
  return id;
}

const PrefixTree::Target* PrefixTree::known(std::string_view target) const {
  const auto at = targets_.find(std::string(target));
  return at == targets_.end() ? nullptr : &at->second;
}

std::size_t PrefixTree::target_bytes(std::string_view target) const {
  const Target* const id = known(target);
  return id == nullptr ? 0 : target_bytes_[*id];
}

std::optional<PrefixTree::Target> PrefixTree::add(std::string_view prompt,
                                                  std::string_view target_name) {
  ++num_adds_;
  const std::size_t bound = std::min(max_target_bytes_, max_bytes_);
  std::string_view rest = prompt.substr(0, bound < kEntryBytes ? 0 : bound - kEntryBytes);
  rest.remove_suffix(rest.size() % unit_bytes_);
  if (rest.empty()) return std::nullopt;
  const Target target = intern(target_name);
  split_.clear();
  if (prompt.data() != matched_.data() || prompt.size() != matched_.size()) walk(prompt);
  matched_ = {};
  Node* node = &root_;
  for (std::size_t place = 0; !rest.empty(); ++place) {
    Node* child = place < way_.size() ? way_[place].node : nullptr;
    std::size_t same = rest.size();
    if (child == nullptr) {
      auto made = std::make_unique<Node>();
      made->label = std::string(rest);
      made->parent = node;
      child = made.get();
      node->children.emplace(first_unit(rest), std::move(made));
      num_bytes_ += rest.size();
      ++num_nodes_;
    } else {
      same = std::min(way_[place].same, rest.size());
      if (same < child->label.size()) child = split(child, same);
    }
    hold(child, target);
    node = child;
    rest.remove_prefix(same);
  }
  shrink(target);
  shrink_split();
  shrink_all();
  release_name(target);
  return target;
}

// Finds the way of `prompt`, as far as its bytes are in the tree.
void PrefixTree::walk(std::string_view prompt) {
  way_.clear();
  const Node* node = &root_;
  while (Node* const child = child_of(*node, prompt)) {
    const std::size_t same = common(child->label, prompt);
    way_.push_back({child, same});
    if (same < child->label.size()) break;
    prompt.remove_prefix(same);
    node = child;
  }
}

std::vector<PrefixTree::Match> PrefixTree::match(std::string_view prompt) {
  walk(prompt);
  matched_ = prompt;
  std::vector<Match> matches;
  if (way_.empty()) return matches;
  // The targets of a node are among its parent's: each leaves the way at one place.
  matches.reserve(way_.front().node->held.size());
  std::size_t num_bytes = 0;
  for (std::size_t place = 0; place < way_.size(); ++place) {
    const Node* const below = place + 1 < way_.size() ? way_[place + 1].node : nullptr;
    num_bytes += way_[place].same;
    for (const Held& held : way_[place].node->held)
      if (below == nullptr || below->find(held.target) == nullptr)
        matches.push_back({held.target, num_bytes / unit_bytes_});
  }
  return matches;
}

void PrefixTree::trim(std::string_view prompt, std::string_view target_name,
                      std::size_t num_units) {
  const Target* const found = known(target_name);
  if (found == nullptr) return;
  const Target target = *found;
  matched_ = {};
  // No prompt is as long as a product that does not fit.
  const std::size_t keep = num_units > prompt.size() ? prompt.size() : num_units * unit_bytes_;
  split_.clear();
  Node* node = &root_;
  std::size_t at = 0;
  while (Node* const child = child_of(*node, prompt.substr(at))) {
    const std::size_t same = common(child->label, prompt.substr(at));
    if (at + same > keep) {
      if (child->find(target) != nullptr) {
        if (at < keep) split(child, keep - at);
        take(child, target);
      }
      break;
    }
    if (same < child->label.size()) break;
    node = child;
    at += same;
  }
  shrink_split();
  shrink_all();
  release_name(target);
}

void PrefixTree::forget(std::string_view target_name) {
  const Target* const found = known(target_name);
  if (found == nullptr) return;
  const Target target = *found;
  matched_ = {};
  while (!leaves_[target].empty()) take_leaf(leaves_[target].begin()->second, target);
  release_name(target);
}

std::vector<PrefixTree::Entry> PrefixTree::dump() const {
  std::vector<Entry> entries;
  std::vector<std::pair<const Node*, std::size_t>> stack;
  const auto push = [&stack](const Node& node, std::size_t depth) {
    const auto start = static_cast<std::ptrdiff_t>(stack.size());
    for (const auto& [first, child] : node.children) stack.emplace_back(child.get(), depth);
    std::sort(stack.begin() + start, stack.end(), [](const auto& one, const auto& other) {
      return one.first->label > other.first->label;
    });
  };
  push(root_, 0);
  while (!stack.empty()) {
    const auto [node, depth] = stack.back();
    stack.pop_back();
    Entry entry{depth, node->label, {}};
    for (const Held& held : node->held) entry.stamps.push_back({held.target, held.stamp});
    std::sort(entry.stamps.begin(), entry.stamps.end(),
              [this](const Stamp& one, const Stamp& other) {
                return name(one.target) < name(other.target);
              });
    entries.push_back(std::move(entry));
    push(*node, depth + 1);
  }
  return entries;
}

// Puts a node above `node` with the first `at` bytes of its label and the same targets.
PrefixTree::Node* PrefixTree::split(Node* node, std::size_t at) {
  Node* const parent = node->parent;
  auto& place = parent->children[first_unit(node->label)];
  auto upper = std::make_unique<Node>();
  upper->label = node->label.substr(0, at);
  upper->parent = parent;
  upper->held = node->held;
  for (Held& held : upper->held) {
    held.num_children = 1;
    target_bytes_[held.target] += kEntryBytes;
    split_.push_back(held.target);
  }
  num_bytes_ += kEntryBytes * upper->held.size();
  ++num_nodes_;
  std::unique_ptr<Node> lower = std::move(place);
  // Not erase: a string keeps its memory when it gets shorter.
  lower->label = std::string(lower->label, at);
  lower->parent = upper.get();
  upper->children.emplace(first_unit(lower->label), std::move(lower));
  place = std::move(upper);
  return place.get();
}

// Puts `target` into `node`, whose parent has it, with the stamp of this insertion.
void PrefixTree::hold(Node* node, Target target) {
  auto at = std::lower_bound(node->held.begin(), node->held.end(), target, by_target);
  if (at != node->held.end() && at->target == target) {
    if (is_fifo_) return;
    if (at->num_children == 0) leaves_[target].erase({at->stamp, node});
    at->stamp = num_adds_;
    if (at->num_children == 0) add_leaf(node, target);
    return;
  }
  node->held.insert(at, {target, 0, num_adds_});
  target_bytes_[target] += node->label.size() + kEntryBytes;
  num_bytes_ += kEntryBytes;
  add_leaf(node, target);
  if (node->parent == &root_) return;
  Held* const above = node->parent->find(target);
  if (above->num_children++ == 0) leaves_[target].erase({above->stamp, node->parent});
}

// Nothing has a later stamp than this insertion, so no place has to be searched for.
void PrefixTree::add_leaf(Node* node, Target target) {
  leaves_[target].insert(leaves_[target].end(), {num_adds_, node});
}

// Takes `target` from `node`, below which nobody has it; a node of nobody goes.
void PrefixTree::take_leaf(Node* node, Target target) {
  const auto at = std::lower_bound(node->held.begin(), node->held.end(), target, by_target);
  leaves_[target].erase({at->stamp, node});
  node->held.erase(at);
  target_bytes_[target] -= node->label.size() + kEntryBytes;
  num_bytes_ -= kEntryBytes;
  Node* const parent = node->parent;
  if (parent != &root_) {
    Held* const above = parent->find(target);
    if (--above->num_children == 0) leaves_[target].insert({above->stamp, parent});
  }
  if (node->held.empty()) {
    num_bytes_ -= node->label.size();
    --num_nodes_;
    parent->children.erase(first_unit(node->label));
  }
}

// Takes `target` from `node` and all below.
void PrefixTree::take(Node* node, Target target) {
  std::vector<Node*> path{node};
  for (std::size_t place = 0; place < path.size(); ++place)
    for (const auto& [first, child] : path[place]->children)
      if (child->find(target) != nullptr) path.push_back(child.get());
  for (std::size_t place = path.size(); place-- > 0;) take_leaf(path[place], target);
}

void PrefixTree::shrink(Target target) {
  while (target_bytes_[target] > max_target_bytes_)
    take_leaf(leaves_[target].begin()->second, target);
}

// A split charges every target of the node for one more.
void PrefixTree::shrink_split() {
  for (const Target target : split_) shrink(target);
}

void PrefixTree::shrink_all() {
  while (num_bytes_ > max_bytes_) {
    const auto heavier = [this](const auto& one, const auto& other) {
      const std::size_t mine = target_bytes_[one.second];
      const std::size_t theirs = target_bytes_[other.second];
      return mine != theirs ? mine < theirs : one.first > other.first;
    };
    const Target heaviest = std::max_element(targets_.begin(), targets_.end(), heavier)->second;
    take_leaf(leaves_[heaviest].begin()->second, heaviest);
  }
}

// A target that holds nothing is not remembered: names come and go.
void PrefixTree::release_name(Target target) {
  if (target_bytes_[target] != 0) return;
  targets_.erase(names_[target]);
  names_[target].clear();
  free_.push_back(target);
}

}  // namespace banaserve
