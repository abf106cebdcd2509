#include "train/checkpoint_snapshot.h"

#include <ATen/ATen.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "grad/torch_dtype.h"
#include "io/safetensors_writer.h"
#include "models/lora_table.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

void add_optimizer(std::vector<StatePart>& parts, const OptimizerState& state) {
  const auto& contract = *state.view.contract;
  const auto named = [&](const std::string& kept) {
    return concat(kOptimizerPrefix, kept, "/", contract.name);
  };
  for (const auto& kept : state.kept) {
    parts.push_back({named(kept.name), contract.shape, std::nullopt, state.view.begin,
                     state.view.end, kept.values});
  }
  // Exactly one shard holds the first element.
  if (state.steps > 0 && state.view.begin == 0 && state.view.end > 0) {
    parts.push_back({named("step"),
                     {},
                     std::nullopt,
                     0,
                     1,
                     at::full({1}, state.steps, at::TensorOptions().dtype(at::kLong))});
  }
}

/// Buffers with the digits of the folder that training began with: every rank holds them whole.
void add_buffers(std::vector<StatePart>& parts, const ShardedBase& model,
                 const SourceDType& source_dtype) {
  for (const auto& view : model.buffers()) {
    const auto& contract = *view.contract;
    if (!contract.stored) continue;
    parts.push_back({concat(kModelPrefix, contract.name), contract.shape,
                     source_dtype(contract.name), 0, view.tensor.numel(),
                     view.stored.reshape({-1})});
  }
}

/// The first checkpoint touches the buffer for the first time, while a step waits: one fault for
/// 512 pages, where the system can.
void take_huge_pages(const at::Tensor& buffer) {
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<std::uintptr_t>(buffer.const_data_ptr());
  const auto first = (begin + kHugePage - 1) & ~(kHugePage - 1);
  const auto last = (begin + buffer.nbytes()) & ~(kHugePage - 1);
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace

std::vector<StatePart> state_parts(const ShardedBase& model, const Optimizer& optimizer,
                                   const SourceDType& source_dtype, Holds holds) {
  std::vector<StatePart> parts;
  std::vector<StatePart> whole;  // on every rank: each writes its cut
  for (const auto& view : model.shards()) {
    const auto& contract = *view.contract;
    if (holds == Holds::kAdapters && !models::is_adapter(contract.name)) continue;
    (contract.replicated() ? whole : parts)
        .push_back({concat(kModelPrefix, contract.name), contract.shape,
                    source_dtype(contract.name), view.begin, view.end, view.shard.detach()});
  }
  if (holds == Holds::kModel) add_buffers(whole, model, source_dtype);
  const auto& runtime = model.unit()->runtime();
  for (auto& part : cut(whole, runtime.shard_rank(), runtime.plan_options().ranks)) {
    parts.push_back(std::move(part));
  }
  for (const auto& state : optimizer.state()) add_optimizer(parts, state);
  std::erase_if(parts, [](const StatePart& part) { return part.begin == part.end; });
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
      return std::clamp<std::int64_t>((byte - at + size - 1) / size, 0, part.end - part.begin);
    };
    const auto begin = elements_before(first_byte);
    const auto end = elements_before(last_byte);
    if (begin < end) {
      auto piece = part;
      piece.begin = part.begin + begin;
      piece.end = part.begin + end;
      piece.values = part.values.narrow(0, begin, end - begin);
      mine.push_back(std::move(piece));
    }
    at += static_cast<std::int64_t>(part.values.nbytes());
  }
  return mine;
}

std::byte* Snapshot::grow_to(std::size_t size) {
  if (!buffer_.defined() || buffer_.nbytes() < size) {
    buffer_ = at::Tensor();  // two would be twice the memory
    buffer_ = at::empty({static_cast<std::int64_t>(size)}, at::TensorOptions().dtype(at::kByte));
    take_huge_pages(buffer_);
  }
  size_ = size;
  return data_ = static_cast<std::byte*>(buffer_.mutable_data_ptr());
}

void Snapshot::take(const std::vector<StatePart>& parts, const std::string& name) {
  const at::NoGradGuard no_grad;
  name_ = name;
  entries_ = {};
  std::vector<TensorSpec> specs;
  for (const auto& part : parts) {
    const auto dtype = to_dtype(part.values.scalar_type());
    specs.push_back({part.name, dtype, {part.end - part.begin}});
    entries_.tensors[part.name] = {
        dtype,
        part.shape,
        part.source_dtype,
        {{name, part.name, TensorBox::whole(part.shape), part.begin, part.end}}};
  }
  const auto layout = lay_out_safetensors(std::move(specs));
  auto* const data = grow_to(static_cast<std::size_t>(layout.file_bytes));
  std::memcpy(data, layout.beginning.data(), layout.beginning.size());
  for (const auto& part : parts) {
    // By element size, largest first, after a beginning of whole 8 bytes: each is aligned.
    auto place = at::from_blob(data + layout.header.find(part.name)->begin, part.values.sizes(),
                               part.values.options().requires_grad(false));
    place.copy_(part.values);
  }
}

}  // namespace tessera::train
