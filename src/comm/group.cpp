#include "comm/group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>

#include "base/trace.h"
#include "tessera/error.h"

namespace tessera::comm {

std::string_view to_string(Kind kind) {
  switch (kind) {
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kAllToAll:
      return "all_to_all";
    case Kind::kBatch:
      return "batch";
  }
  return "unknown";
}

std::int64_t Batch::bytes() const {
  std::int64_t sum = 0;
  for (const Op& op : ops) {
    if (const auto* gather = std::get_if<AllGather>(&op)) {
      sum += static_cast<std::int64_t>(gather->buffer.nbytes());
    } else if (const auto* reduce = std::get_if<ReduceScatter>(&op)) {
      sum += static_cast<std::int64_t>(reduce->input.nbytes());
    } else if (const auto* all = std::get_if<AllReduce>(&op)) {
      sum += static_cast<std::int64_t>(all->data.nbytes());
    } else {
      sum += static_cast<std::int64_t>(std::get<AllToAll>(op).input.nbytes());
    }
  }
  return sum;
}

void all_reduce(Group& group, at::Tensor data, const std::string& what) {
  Batch batch;
  batch.label.kind = Kind::kAllReduce;
  batch.label.unit = what;
  batch.ops.emplace_back(AllReduce{std::move(data)});
  RECORD_USER_SCOPE("tessera::wait");
  const TraceScope traced(TraceRow::kWaits, what);
  group.issue(std::move(batch))->wait();
}

namespace {

void all_gather(Group& group, at::Tensor buffer, const std::string& what) {
  Batch batch;
  batch.label.kind = Kind::kAllGather;
  batch.label.unit = what;
  batch.ops.emplace_back(AllGather{std::move(buffer)});
  group.issue(std::move(batch))->wait();
}

/// Every rank's bytes, each padded to `slice`.
std::vector<std::string> gather_slices(Group& group, const std::string& mine, std::size_t slice,
                                       const std::string& what) {
  const auto ranks = static_cast<std::size_t>(group.size());
  auto texts = at::empty({static_cast<std::int64_t>(slice * ranks)}, at::kByte);
  auto* bytes = static_cast<char*>(texts.mutable_data_ptr());
  if (!mine.empty()) {
    std::memcpy(bytes + static_cast<std::size_t>(group.rank()) * slice, mine.data(), mine.size());
  }
  all_gather(group, texts, what);
  std::vector<std::string> all;
  all.reserve(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) all.emplace_back(bytes + rank * slice, slice);
  return all;
}

}  // namespace

std::vector<std::string> all_gather_fixed(Group& group, const std::string& mine,
                                          const std::string& what) {
  RECORD_USER_SCOPE("tessera::wait");
  return gather_slices(group, mine, mine.size(), what);
}

std::vector<std::string> all_gather_bytes(Group& group, const std::string& mine,
                                          const std::string& what) {
  RECORD_USER_SCOPE("tessera::wait");
  const TraceScope traced(TraceRow::kWaits, what);
  auto lengths = at::zeros({group.size()}, at::kLong);
  auto* length = lengths.mutable_data_ptr<std::int64_t>();
  length[group.rank()] = static_cast<std::int64_t>(mine.size());
  all_gather(group, lengths, what);
  const auto longest = static_cast<std::size_t>(*std::max_element(length, length + group.size()));
  auto all = gather_slices(group, mine, longest, what);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    all[rank].resize(static_cast<std::size_t>(length[rank]));
  }
  return all;
}

void barrier(Group& group, const std::string& what) {
  all_reduce(group, at::zeros({1}, at::kByte), what);
}

}  // namespace tessera::comm
