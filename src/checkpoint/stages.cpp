#include "checkpoint/stages.h"

#include <string_view>

#include "comm/group.h"
#include "tessera/world.h"

namespace tessera::checkpointing {
namespace {

/// Behind each name.
constexpr char kEnd = '\0';

std::string own_names(const ShardedBase& model, const Holds& holds) {
  std::string text;
  for (const auto& view : model.shards()) {
    if (!holds || holds(view.contract->name)) text += view.contract->name + kEnd;
  }
  for (const auto& view : model.buffers()) {
    if (view.contract->stored && !holds) text += view.contract->name + kEnd;
  }
  return text;
}

void add_names(std::set<std::string, std::less<>>& names, std::string_view text) {
  while (!text.empty()) {
    const std::size_t end = text.find(kEnd);
    names.emplace(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
}

}  // namespace

NamesOfStages names_of_stages(const ShardedBase& model, const Holds& holds) {
  const Mesh& mesh = model.mesh();
  const std::string mine = own_names(model, holds);
  NamesOfStages names;
  add_names(names.everywhere, mine);
  if (mesh.size_of(axis::kPipeline) == 1) return names;
  const auto group = mesh.world()->group(mesh.ranks_of({axis::kPipeline}), "checkpoint control");
  const auto all = comm::all_gather_bytes(*group, mine, "checkpoint: names of the stages");
  for (std::size_t stage = 0; stage < all.size(); ++stage) {
    add_names(names.everywhere, all[stage]);
    if (static_cast<int>(stage) < group->rank()) add_names(names.of_earlier, all[stage]);
  }
  return names;
}

}  // namespace tessera::checkpointing
