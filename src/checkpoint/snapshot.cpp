#include "checkpoint/snapshot.h"

#include <ATen/ATen.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string_view>
#include <vector>

#include "comm/group.h"
#include "fsdp/runtime/model_names.h"
#include "grad/torch_dtype.h"
#include "io/safetensors.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::checkpointing {
namespace {

/// A shard in the tensors of the file, and what is written of it under other names.
class ShardParts {
 public:
  ShardParts(const ShardView& view, const FileForm& form)
      : view_(view), form_(form), pieces_(pieces_of(view, form.file)) {}

  void add_values(std::vector<StatePart>& parts, const std::string& prefix,
                  const at::Tensor& values, const SourceDType& source_dtype) const {
    for (const layout::Piece& piece : pieces_) {
      const std::string& name = form_.names[piece.tensor];
      parts.push_back({prefix + name, form_.file.shape,
                       source_dtype ? source_dtype(name) : std::nullopt, piece.box, piece.in_box,
                       values.narrow(0, piece.local.begin - view_.begin, piece.local.size())});
    }
  }

  /// Adds a number to each tensor; the one rank that holds its first element writes it.
  void add_number(std::vector<StatePart>& parts, const std::string& prefix,
                  std::int64_t number) const {
    const auto value = at::full({1}, number, at::TensorOptions().dtype(at::kLong));
    for (const layout::Piece& piece : pieces_) {
      const bool at_front = std::ranges::all_of(piece.box.offset, [](auto o) { return o == 0; });
      if (piece.in_box.begin != 0 || !at_front) continue;
      parts.push_back({prefix + form_.names[piece.tensor], {}, std::nullopt, {}, {0, 1}, value});
    }
  }

 private:
  const ShardView& view_;
  const FileForm& form_;
  std::vector<layout::Piece> pieces_;
};

/// This rank's place among those that hold the same.
using Holder = Place;
using Whole = std::map<Holder, std::vector<StatePart>>;

/// Returns the holder of what is whole on the ranks of the data axes; of all axes where no layer
/// cuts it.
Holder holder_of(const ParameterLayout& layout, const Mesh& mesh) {
  if (layout.axes.empty()) return place_among(mesh.shapes().stage_of(mesh.world()->rank()), mesh);
  if (layout.mesh == MeshKind::kSparse) {
    return place_among(mesh.ranks_of({axis::kReplicate, axis::kExpertData}), mesh);
  }
  return place_among(mesh.shapes().dense().group_of(
                         mesh.world()->rank(), {axis::kReplicate, axis::kShard, axis::kContext}),
                     mesh);
}

/// Adds this rank's shards; parameters that are whole on every rank of the data axes go to `whole`.
void add_model(std::vector<StatePart>& parts, Whole& whole, const ShardedBase& model,
               const fsdp::ModelNames& names, const StateOptions& options) {
  const Mesh& mesh = model.mesh();
  for (const auto& view : model.shards()) {
    const auto& contract = *view.contract;
    if (options.holds && !options.holds(contract.name)) continue;
    const auto name = names.of(contract).front();
    if (options.of_earlier_stages.contains(name) || !is_first_holder(view)) continue;
    const FileForm form = options.forms.of(contract, name);
    auto& to = contract.replicated() ? whole[holder_of(contract.layout, mesh)] : parts;
    ShardParts(view, form)
        .add_values(to, std::string(kModelPrefix), view.shard.detach(), options.source_dtype);
  }
}

void add_optimizer(std::vector<StatePart>& parts, const OptimizerState& state,
                   const fsdp::ModelNames& names, const StateOptions& options) {
  const auto name = names.of(*state.view.contract).front();
  if (options.of_earlier_stages.contains(name) || !is_first_holder(state.view)) return;
  const FileForm form = options.forms.of(*state.view.contract, name);
  const ShardParts shard(state.view, form);
  const auto prefix = [](const std::string& kept) { return concat(kOptimizerPrefix, kept, "/"); };
  for (const auto& kept : state.kept) shard.add_values(parts, prefix(kept.name), kept.values, {});
  if (state.steps > 0) shard.add_number(parts, prefix("step"), state.steps);
}

/// Adds buffers with the dtype of the folder with which training began: every rank holds them
/// whole.
void add_buffers(std::vector<StatePart>& parts, const ShardedBase& model,
                 const fsdp::ModelNames& names, const StateOptions& options) {
  for (const auto& [all, view] : names.stored_buffers(model)) {
    const auto& name = all.front();
    const auto& shape = view.contract->shape;
    if (options.of_earlier_stages.contains(name)) continue;
    parts.push_back({concat(kModelPrefix, name),
                     shape,
                     options.source_dtype ? options.source_dtype(name) : std::nullopt,
                     TensorBox::whole(shape),
                     {0, view.tensor.numel()},
                     view.stored.reshape({-1})});
  }
}

/// Returns the key of the part in the file `name`.
std::string add_entry(CheckpointManifest& entries, const StatePart& part, const std::string& name) {
  auto& entry =
      entries.tensors
          .try_emplace(part.name,
                       CheckpointTensor{
                           to_dtype(part.values.scalar_type()), part.shape, part.source_dtype, {}})
          .first->second;
  // This rank may hold several parts of a tensor that is cut.
  const std::string key = piece_key(part.name, entry.pieces.size() + 1);
  entry.pieces.push_back({name, key, part.box, part.elements.begin, part.elements.end});
  return key;
}

/// Returns the device of training: numbers that are counted on the host are among the parts, too.
at::Device device_of(const std::vector<StatePart>& parts) {
  for (const auto& part : parts) {
    if (!part.values.is_cpu()) return part.values.device();
  }
  return at::kCPU;
}

/// The first checkpoint accesses the buffer for the first time, while a step waits: huge pages make
/// it one fault for 512 pages, where the system has them.
void take_huge_pages(const at::Tensor& buffer) {
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<std::uintptr_t>(buffer.const_data_ptr());
  const auto first = (begin + kHugePage - 1) & ~(kHugePage - 1);
  const auto last = (begin + buffer.nbytes()) & ~(kHugePage - 1);
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace

Place place_among(const std::vector<int>& ranks, const Mesh& mesh) {
  const auto self = std::ranges::find(ranks, mesh.world()->rank());
  TESSERA_INVARIANT(self != ranks.end(), "a rank outside its own group");
  return {static_cast<int>(self - ranks.begin()), static_cast<int>(ranks.size())};
}

std::vector<layout::Piece> pieces_of(const ShardView& view, const layout::FileShape& file) {
  return pieces_in_file(view.contract->layout, view.contract->shape, file, view.coordinates,
                        {view.begin, view.end});
}

bool is_first_holder(const ShardView& view) {
  const ParameterLayout& layout = view.contract->layout;
  for (std::size_t i = 0; i < layout.axes.size(); ++i) {
    // Each rank has other elements of a trained parameter that is summed over the axis.
    const PlacementKind kind = layout.axes[i].parameter.kind;
    const bool same = kind == PlacementKind::kInvariant ||
                      (kind == PlacementKind::kReplicate && view.contract->replicated());
    if (same && view.coordinates[i] != 0) return false;
  }
  return true;
}

std::vector<StatePart> state_parts(const ShardedBase& model, const Optimizer& optimizer,
                                   const StateOptions& options) {
  std::vector<StatePart> parts;
  Whole whole;
  const fsdp::ModelNames names(model);
  add_model(parts, whole, model, names, options);
  for (const auto& state : optimizer.state()) add_optimizer(parts, state, names, options);
  parts = cut(parts, options.replica, options.replicas);
  for (const auto& [holder, same] : whole) {
    for (auto& part : cut(same, holder.rank, holder.ranks)) parts.push_back(std::move(part));
  }
  // One rank writes all of them: others may hold other values, as BatchNorm those of their own
  // rows, and a mean of one rank with a variance of another would belong to none.
  if (!options.holds && holder_of({}, model.mesh()).rank == 0) {
    add_buffers(parts, model, names, options);
  }
  std::erase_if(parts, [](const StatePart& part) { return part.elements.empty(); });
  return parts;
}

std::vector<StatePart> cut(const std::vector<StatePart>& parts, int replica, int replicas) {
  std::int64_t total = 0;
  for (const auto& part : parts) total += static_cast<std::int64_t>(part.values.nbytes());
  const std::int64_t first_byte = total * replica / replicas;
  const std::int64_t last_byte = total * (replica + 1) / replicas;
  std::vector<StatePart> mine;
  std::int64_t at = 0;  // bytes before the part
  for (const auto& part : parts) {
    const auto size = static_cast<std::int64_t>(part.values.element_size());
    // An element belongs to the cut in which it begins.
    const auto elements_before = [&](std::int64_t byte) {
      return std::clamp<std::int64_t>((byte - at + size - 1) / size, 0, part.elements.size());
    };
    const auto begin = elements_before(first_byte);
    const auto end = elements_before(last_byte);
    if (begin < end) {
      auto piece = part;
      piece.elements = {part.elements.begin + begin, part.elements.begin + end};
      piece.values = part.values.narrow(0, begin, end - begin);
      mine.push_back(std::move(piece));
    }
    at += static_cast<std::int64_t>(part.values.nbytes());
  }
  return mine;
}

CheckpointManifest entries_of(const std::vector<StatePart>& parts, const std::string& name) {
  CheckpointManifest entries;
  for (const auto& part : parts) add_entry(entries, part, name);
  return entries;
}

Snapshot::~Snapshot() {
  try {
    release();
  } catch (const std::exception&) {
    // The device no longer answers: its memory is lost with it.
  }
}

void Snapshot::release() {
  end_.block(comm::Stream::current(stream_.device()), comm::EventSite::kSnapshotEnd);
  reads_.clear();
}

void Snapshot::grow_to(std::int64_t size, at::Device from) {
  size_ = size;
  // All but the last one have one size.
  const std::int64_t most = from.is_cpu() ? size : pinned_block_;
  std::int64_t held = 0;
  for (const at::Tensor& block : blocks_) held += block.numel();
  if (held >= size) return;
  if (!blocks_.empty() && blocks_.back().numel() < most) {
    held -= blocks_.back().numel();
    blocks_.pop_back();  // two would be twice the memory
  }
  for (; held < size; held += blocks_.back().numel()) {
    const at::TensorOptions bytes(at::kByte);
    blocks_.push_back(
        at::empty({std::min(most, size - held)}, bytes.pinned_memory(!from.is_cpu())));
    if (from.is_cpu()) take_huge_pages(blocks_.back());
  }
}

at::Tensor Snapshot::chunk(std::int64_t begin, std::int64_t most) const {
  const std::int64_t whole = blocks_.front().numel();
  const at::Tensor& block = blocks_.at(static_cast<std::size_t>(begin / whole));
  return block.narrow(0, begin % whole, std::min(most, block.numel() - begin % whole));
}

std::vector<std::span<const std::byte>> Snapshot::bytes() const {
  std::vector<std::span<const std::byte>> all;
  for (std::int64_t begin = 0; begin < size_;) {
    const at::Tensor next = chunk(begin, size_ - begin);
    all.emplace_back(static_cast<const std::byte*>(next.const_data_ptr()), next.nbytes());
    begin += next.numel();
  }
  return all;
}

void Snapshot::take(const std::vector<StatePart>& parts, const std::string& name) {
  const at::NoGradGuard no_grad;
  name_ = name;
  entries_ = {};
  std::vector<TensorSpec> specs;
  std::vector<std::string> keys;
  for (const auto& part : parts) {
    keys.push_back(add_entry(entries_, part, name));
    specs.push_back({keys.back(), to_dtype(part.values.scalar_type()), {part.elements.size()}});
  }
  const auto layout = lay_out_safetensors(std::move(specs));
  const at::Device from = device_of(parts);
  grow_to(layout.file_bytes, from);
  for (std::size_t done = 0; done < layout.beginning.size();) {
    const auto rest = std::span(layout.beginning).subspan(done);
    const at::Tensor place = chunk(static_cast<std::int64_t>(done), std::ssize(rest));
    std::memcpy(place.mutable_data_ptr(), rest.data(), place.nbytes());
    done += place.nbytes();
  }
  release();
  if (stream_.device() != from) stream_ = comm::Stream::make(from);
  comm::order(comm::Stream::current(from), stream_, comm::EventSite::kSnapshot);
  const comm::StreamScope copies(stream_);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor& values = parts[i].values;
    const auto begin = static_cast<std::int64_t>(layout.header.find(keys[i])->begin);
    const auto size = static_cast<std::int64_t>(values.element_size());
    // By element size, largest first, after a beginning of whole 8 bytes: each is aligned, and no
    // block ends inside an element.
    for (std::int64_t done = 0; done < values.numel();) {
      const at::Tensor place =
          chunk(begin + done * size, (values.numel() - done) * size).view(values.scalar_type());
      place.copy_(values.narrow(0, done, place.numel()), /*non_blocking=*/true);
      done += place.numel();
    }
    if (!values.is_cpu()) reads_.push_back(values);
  }
  end_.record(stream_, comm::EventSite::kSnapshotEnd);
}

namespace {

/// Ends each name, and once more the last name of a tensor.
constexpr char kEnd = '\0';
constexpr char kParameter = 'p', kBuffer = 'b';  // before the first one

std::string own_names(const ShardedBase& model, const Holds& holds) {
  const fsdp::ModelNames names(model);
  std::string text;
  const auto add = [&](char kind, const std::vector<std::string>& all) {
    text += kind;
    for (const auto& name : all) text += name + kEnd;
    text += kEnd;
  };
  for (const auto& view : model.shards()) {
    if (!holds || holds(view.contract->name)) add(kParameter, names.of(*view.contract));
  }
  if (holds) return text;
  for (const auto& buffer : names.stored_buffers(model)) add(kBuffer, buffer.names);
  return text;
}

std::string take_name(std::string_view& text) {
  const std::size_t end = text.find(kEnd);
  std::string name(text.substr(0, end));
  text.remove_prefix(end + 1);
  return name;
}

TensorNames take_tensor(std::string_view& text) {
  TensorNames tensor{text.front() == kBuffer, {}};
  text.remove_prefix(1);
  for (auto name = take_name(text); !name.empty(); name = take_name(text)) {
    tensor.names.push_back(std::move(name));
  }
  return tensor;
}

/// The text of each stage, in their order, and the index of this rank's. Collective.
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
    for (std::string_view text = said.all[stage]; !text.empty();) {
      names.everywhere.push_back(take_tensor(text));
      if (stage < said.own) names.of_earlier.insert(names.everywhere.back().names.front());
    }
  }
  return names;
}

std::set<std::string> kept_in_stages(const ShardedBase& model, const Optimizer& optimizer) {
  std::string mine;
  for (const auto& name : optimizer.kept_names()) mine += name + kEnd;
  std::set<std::string> names;
  for (std::string_view text : tell_stages(model, mine, "checkpoint: what optimizers keep").all) {
    while (!text.empty()) names.insert(take_name(text));
  }
  return names;
}

}  // namespace tessera::checkpointing
