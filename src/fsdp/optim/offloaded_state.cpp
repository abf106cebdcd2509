#include "fsdp/optim/offloaded_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "base/trace.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

std::int64_t bytes_of(std::int64_t numel, at::ScalarType dtype) {
  return numel * static_cast<std::int64_t>(c10::elementSize(dtype));
}

/// Where a tensor begins in a part with so many elements.
std::int64_t offset_in_part(const KeptForm& form, std::size_t tensor, std::int64_t numel) {
  const auto sizes = form.element_sizes();
  return part_bytes(std::span(sizes).first(tensor), numel);
}

layout::Range part_at(const KeptForm& form, std::int64_t element) {
  const auto begin = element / kMasterPart * kMasterPart;
  return {begin, std::min(begin + kMasterPart, form.numel)};
}

/// Where that part begins among those of its parameter.
std::int64_t offset_of_part(const KeptForm& form, const layout::Range& part) {
  return kept_bytes(form.element_sizes(), part.begin);
}

at::Tensor as_bytes(const at::Tensor& values) { return values.view(at::kByte); }

}  // namespace

std::vector<std::int64_t> KeptForm::element_sizes() const {
  std::vector<std::int64_t> sizes;
  for (const auto dtype : dtypes) sizes.push_back(bytes_of(1, dtype));
  return sizes;
}

std::size_t OffloadedState::add(KeptForm form) {
  const auto bytes = kept_bytes(form.element_sizes(), form.numel);
  places_.push_back({std::move(form), end_});
  end_ += bytes;
  return places_.size() - 1;
}

void OffloadedState::reserve(std::span<const std::size_t> in_use) {
  tier_->reserve(end_);
  StateBytes all;
  for (const auto place : in_use) {
    const auto& form = places_.at(place).form;
    const auto sizes = form.element_sizes();
    all.bytes += kept_bytes(sizes, form.numel);
    all.largest_part =
        std::max(all.largest_part, part_bytes(sizes, std::min(form.numel, kMasterPart)));
  }
  chunk_bytes_ = chunk_bytes(all);
}

void OffloadedState::clear() {
  places_.clear();
  end_ = 0;
}

void OffloadedState::read(std::size_t place, std::size_t tensor, std::int64_t begin,
                          const at::Tensor& to) {
  const auto& [form, offset] = places_.at(place);
  const auto dtype = form.dtypes.at(tensor);
  TESSERA_INVARIANT(to.scalar_type() == dtype && begin >= 0 && begin + to.numel() <= form.numel,
                    "a read of what is not kept");
  StateTier::Ticket last = 0;
  for (std::int64_t done = 0; done < to.numel();) {
    const auto part = part_at(form, begin + done);
    const auto in_part = begin + done - part.begin;
    const auto count = std::min(to.numel() - done, part.size() - in_part);
    const auto from = offset + offset_of_part(form, part) +
                      offset_in_part(form, tensor, part.size()) + bytes_of(in_part, dtype);
    last = tier_->read(from, as_bytes(to.narrow(0, done, count)));
    done += count;
  }
  tier_->wait(last);
}

void OffloadedState::write(std::size_t place, std::span<const at::Tensor> tensors) {
  const auto& [form, offset] = places_.at(place);
  TESSERA_INVARIANT(tensors.size() == form.dtypes.size(), "a write of what is not kept");
  StateTier::Ticket last = 0;
  for (std::int64_t begin = 0; begin < form.numel; begin += kMasterPart) {
    const auto part = part_at(form, begin);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      TESSERA_INVARIANT(
          tensors[i].scalar_type() == form.dtypes[i] && tensors[i].numel() == form.numel,
          "a write of what is not kept");
      const auto to = offset + offset_of_part(form, part) + offset_in_part(form, i, part.size());
      last = tier_->write(to, as_bytes(tensors[i].narrow(0, part.begin, part.size())));
    }
  }
  tier_->wait(last);
}

std::vector<OffloadedState::Chunk> OffloadedState::chunks_of(
    const std::vector<Updated>& updated) const {
  std::vector<std::size_t> order(updated.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return updated[i].place; });
  std::vector<Chunk> chunks;
  for (const auto index : order) {
    const auto& [form, offset] = places_.at(updated[index].place);
    for (std::int64_t begin = 0; begin < form.numel; begin += kMasterPart) {
      const auto part = part_at(form, begin);
      const auto from = offset + offset_of_part(form, part);
      const auto bytes = part_bytes(form.element_sizes(), part.size());
      const bool goes_on = !chunks.empty() && from == chunks.back().offset + chunks.back().bytes &&
                           chunks.back().bytes + bytes <= chunk_bytes_;
      if (!goes_on) chunks.push_back({.offset = from, .parts = {}});
      auto& chunk = chunks.back();
      chunk.parts.push_back({index, part, chunk.bytes});
      chunk.bytes += bytes;
      chunk.is_read = chunk.is_read || !updated[index].is_new;
    }
  }
  return chunks;
}

std::vector<OffloadedState::Window> OffloadedState::windows_of(const Chunk& chunk,
                                                               const std::vector<Updated>& updated,
                                                               const at::Tensor& buffer) const {
  std::vector<Window> windows;
  for (const auto& [index, elements, offset] : chunk.parts) {
    const auto& form = places_.at(updated[index].place).form;
    Window window{index, elements, {}};
    for (std::size_t i = 0; i < form.dtypes.size(); ++i) {
      const auto begin = offset + offset_in_part(form, i, elements.size());
      window.kept.push_back(
          buffer.narrow(0, begin, bytes_of(elements.size(), form.dtypes[i])).view(form.dtypes[i]));
    }
    windows.push_back(std::move(window));
  }
  return windows;
}

void OffloadedState::make_buffers() {
  for (auto& buffer : buffers_) {
    if (buffer.defined() && buffer.numel() == chunk_bytes_) continue;
    buffer = at::Tensor();  // the new one would lie beside it
    buffer = at::empty({chunk_bytes_}, at::kByte);
  }
}

std::size_t OffloadedState::buffer_bytes() const {
  std::size_t bytes = 0;
  for (const auto& buffer : buffers_) bytes += buffer.defined() ? buffer.nbytes() : 0;
  return bytes;
}

void OffloadedState::wait(StateTier::Ticket ticket) {
  const auto begin = TraceClock::now();
  tier_->wait(ticket);
  traffic_.waited_ms +=
      std::chrono::duration<double, std::milli>(TraceClock::now() - begin).count();
}

void OffloadedState::run(const std::vector<Chunk>& chunks, const std::vector<Updated>& updated,
                         const std::function<void()>& meanwhile,
                         const std::function<void(std::span<const Window>)>& update) {
  make_buffers();
  const auto memory_of = [&](std::size_t i) {
    return buffers_.at(i % buffers_.size()).narrow(0, 0, chunks[i].bytes);
  };
  // Behind which chunk i may be updated: its own read, else the write of what its buffer had.
  std::vector<StateTier::Ticket> ready(chunks.size(), 0);
  const auto begin_read = [&](std::size_t i) {
    if (i >= chunks.size() || !chunks[i].is_read) return;
    ready[i] = tier_->read(chunks[i].offset, memory_of(i));
    traffic_.bytes_read += chunks[i].bytes;
  };
  begin_read(0);
  begin_read(1);
  meanwhile();
  StateTier::Ticket written = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    wait(ready[i]);
    update(windows_of(chunks[i], updated, memory_of(i)));
    written = tier_->write(chunks[i].offset, memory_of(i));
    traffic_.bytes_written += chunks[i].bytes;
    if (i + 2 < chunks.size()) ready[i + 2] = written;
    begin_read(i + 2);
  }
  wait(written);
}

void OffloadedState::stream(const std::vector<Updated>& updated,
                            const std::function<void()>& meanwhile,
                            const std::function<void(std::span<const Window>)>& update) {
  traffic_ = {};
  const double before = tier_->busy_ms();
  try {
    run(chunks_of(updated), updated, meanwhile, update);
  } catch (...) {
    try {
      tier_->wait(tier_->last());  // the buffers are nobody's again
    } catch (...) {                // NOLINT(bugprone-empty-catch): the first error is the one
    }
    throw;
  }
  traffic_.busy_ms = tier_->busy_ms() - before;
}

}  // namespace tessera::fsdp
