#include "sim/shadow.h"

#include <algorithm>
#include <utility>

namespace tessera::sim {
namespace {

struct Dim {
  std::int64_t stride = 0, size = 0;
};

/// A tensor as `count` dense runs of `length` elements each.
struct Runs {
  std::vector<Dim> dims;  ///< over the runs
  std::int64_t length = 1, count = 1;
};

Runs runs_of(const at::Tensor& tensor) {
  std::vector<Dim> dims;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    // A repeated element is one.
    if (tensor.size(d) > 1 && tensor.stride(d) != 0) {
      dims.push_back({tensor.stride(d), tensor.size(d)});
    }
  }
  std::sort(dims.begin(), dims.end(),
            [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  Runs runs;
  for (const Dim& dim : dims) {
    if (runs.dims.empty() && dim.stride == runs.length) {
      runs.length *= dim.size;
    } else {
      runs.dims.push_back(dim);
      runs.count *= dim.size;
    }
  }
  return runs;
}

/// The first element of a run, counted from the tensor's first.
std::int64_t begin_of(const Runs& runs, std::int64_t number) {
  std::int64_t offset = 0;
  for (const Dim& dim : runs.dims) {
    offset += number % dim.size * dim.stride;
    number /= dim.size;
  }
  return offset;
}

}  // namespace

std::optional<Conflict> Shadow::note_access(const at::Tensor& tensor, bool writes,
                                            const Access& now, const Clock& known) {
  if (tensor.numel() == 0) return std::nullopt;
  const auto first = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const auto bytes = [&](std::int64_t elements) {
    return static_cast<std::uintptr_t>(elements * tensor.element_size());
  };
  const Runs runs = runs_of(tensor);
  if (runs.count > kMostRuns) {
    const std::int64_t last = begin_of(runs, runs.count - 1);
    auto conflict = note_access(first, first + bytes(last + runs.length), writes, now, known);
    if (conflict) conflict->of_range = true;
    return conflict;
  }
  for (std::int64_t run = 0; run < runs.count; ++run) {
    const std::uintptr_t begin = first + bytes(begin_of(runs, run));
    if (auto conflict = note_access(begin, begin + bytes(runs.length), writes, now, known)) {
      return conflict;
    }
  }
  return std::nullopt;
}

std::optional<Conflict> Shadow::note_access(std::uintptr_t begin, std::uintptr_t end, bool writes,
                                            const Access& now, const Clock& known) {
  split(begin);
  split(end);
  const auto from = segments_.lower_bound(begin), to = segments_.lower_bound(end);
  for (auto it = from; it != to; ++it) {
    const Segment& segment = it->second;
    if (!is_over(known, segment.write)) return Conflict{segment.write, true};
    if (!writes) continue;
    for (const Access& read : segment.reads) {
      if (!is_over(known, read)) return Conflict{read, false};
    }
  }
  if (writes) {
    // Everything before is ordered before it: one segment is all that is left to know.
    segments_.erase(from, to);
    segments_.emplace(begin, Segment{end, now, {}});
  } else {
    add_read(begin, end, now);
  }
  return std::nullopt;
}

void Shadow::add_read(std::uintptr_t begin, std::uintptr_t end, const Access& now) {
  auto it = segments_.lower_bound(begin);
  for (std::uintptr_t at = begin; at < end; ++it) {
    if (it == segments_.end() || it->first > at) {  // never accessed
      const std::uintptr_t stop = it == segments_.end() ? end : std::min(end, it->first);
      it = segments_.emplace(at, Segment{stop, {}, {}}).first;
    }
    auto& reads = it->second.reads;
    std::erase_if(reads, [&](const Access& read) { return read.stream == now.stream; });
    reads.push_back(now);
    at = it->second.end;
  }
}

void Shadow::end(std::uintptr_t begin, std::uintptr_t end, const Clock& known) {
  split(begin);
  split(end);
  const auto to = segments_.lower_bound(end);
  for (auto it = segments_.lower_bound(begin); it != to; ++it) {
    Segment& segment = it->second;
    if (is_over(known, segment.write)) segment.write = Access();
    std::erase_if(segment.reads, [&](const Access& read) { return is_over(known, read); });
  }
}

std::optional<Access> Shadow::last_write(std::uintptr_t address) const {
  auto it = segments_.upper_bound(address);
  if (it == segments_.begin()) return std::nullopt;
  --it;
  if (it->second.end <= address || it->second.write.stream < 0) return std::nullopt;
  return it->second.write;
}

void Shadow::split(std::uintptr_t address) {
  auto it = segments_.upper_bound(address);
  if (it == segments_.begin()) return;
  --it;
  if (it->first == address || it->second.end <= address) return;
  Segment rest = it->second;
  it->second.end = address;
  segments_.emplace(address, std::move(rest));
}

}  // namespace tessera::sim
