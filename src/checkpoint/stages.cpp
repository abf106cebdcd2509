#include "checkpoint/stages.h"

#include <string_view>
#include <vector>

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

template <class Names>
void add_names(Names& names, std::string_view text) {
  while (!text.empty()) {
    const std::size_t end = text.find(kEnd);
    names.emplace(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
}

/// What each stage says, in their order, and which of them is this rank's. Collective.
struct Said {
  std::vector<std::string> all;
  std::size_t own = 0;
};
Said tell_stages(const ShardedBase& model, const std::string& mine, const std::string& what) {
  const Mesh& mesh = model.mesh();
  if (mesh.size_of(axis::kPipeline) == 1) return {{mine}, 0};
  const auto group = mesh.world()->group(mesh.ranks_of({axis::kPipeline}), "checkpoint control");
  return {comm::all_gather_bytes(*group, mine, what), static_cast<std::size_t>(group->rank())};
}

}  // namespace

NamesOfStages names_of_stages(const ShardedBase& model, const Holds& holds) {
  const Said said = tell_stages(model, own_names(model, holds), "checkpoint: names of the stages");
  NamesOfStages names;
  for (std::size_t stage = 0; stage < said.all.size(); ++stage) {
    add_names(names.everywhere, said.all[stage]);
    if (stage < said.own) add_names(names.of_earlier, said.all[stage]);
  }
  return names;
}

std::set<std::string> kept_in_stages(const ShardedBase& model, const Optimizer& optimizer) {
  std::string mine;
  for (const auto& name : optimizer.kept_names()) mine += name + kEnd;
  std::set<std::string> names;
  for (const auto& text : tell_stages(model, mine, "checkpoint: what optimizers keep").all) {
    add_names(names, text);
  }
  return names;
}

}  // namespace tessera::checkpointing
