#include "comm/group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/hash.h"
#include "base/interrupt.h"
#include "base/text/printable.h"
#include "base/threads/backward_pass.h"
#include "base/trace.h"
#include "launch/abort_flag.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::comm {

std::int64_t Batch::bytes() const {
  std::int64_t sum = 0;
  for (const Op& op : ops) sum += static_cast<std::int64_t>(first_tensor(op).nbytes());
  return sum;
}

const at::Tensor& first_tensor(const Op& op) {
  return std::visit([](const auto& one) -> const at::Tensor& { return one.first_tensor(); }, op);
}

std::string_view to_string(ActivationPass pass) {
  switch (pass) {
    case ActivationPass::kNone:
      return "";
    case ActivationPass::kForward:
      return "forward";
    case ActivationPass::kBackward:
      return "backward";
    case ActivationPass::kRecomputed:
      return "recomputed";
  }
  return "";
}

void note_pass(Label& label) {
  if (base::in_backward_pass()) label.pass = Pass::kBackward;
}

std::unique_ptr<Work> Group::issue_on_stream(Batch batch, const std::function<void()>& ready) {
  before_.record(Stream::current(stream_.device()), EventSite::kIssue);
  before_.block(stream_, EventSite::kIssue);
  const StreamScope here(stream_);
  const c10::AutoGradMode no_grad(false);
  if (ready) ready();
  return start(std::move(batch));
}

const Stream& Group::host_reads() {
  if (stream_ && !host_reads_) host_reads_ = Stream::make(stream_.device(), StreamUse::kOtherRanks);
  return host_reads_;
}

void Group::use_stream(const Stream& stream, std::shared_ptr<HostWaits> waits) {
  stream_ = stream;
  host_waits_ = std::move(waits);
}

bool carries_messages(std::string_view purpose) {
  return purpose == "data" || purpose == "stages" || purpose.ends_with("control");
}

P2P& Group::p2p() {
  throw Error(
      ErrorKind::kUsage,
      concat("found a group without messages between two ranks (", name(),
             "), expected one of gloo or nccl; pipelines go over these: set comm.backend to one"));
}

namespace {

void issue_and_wait(Group& group, Kind kind, Op op, const std::string& what) {
  Batch batch;
  batch.label.kind = kind;
  batch.label.unit = what;
  batch.ops.push_back(std::move(op));
  group.issue(std::move(batch))->wait();
}

std::vector<std::string> gather(Group& group, const std::string& mine,
                                const std::vector<std::int64_t>& lengths, const std::string& what) {
  std::vector<std::int64_t> begins{0};
  for (const auto length : lengths) begins.push_back(begins.back() + length);
  const auto self = static_cast<std::size_t>(group.rank());
  auto texts = at::empty({begins.back()}, at::kByte);
  auto* bytes = static_cast<char*>(texts.mutable_data_ptr());
  if (!mine.empty()) std::memcpy(bytes + begins[self], mine.data(), mine.size());
  issue_and_wait(group, Kind::kAllGather, RelayedGather{texts, lengths}, what);
  std::vector<std::string> all;
  all.reserve(lengths.size());
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    all.emplace_back(bytes + begins[rank], bytes + begins[rank + 1]);
  }
  return all;
}

std::vector<std::int64_t> equal_lengths(const Group& group, std::size_t length) {
  return std::vector(static_cast<std::size_t>(group.size()), static_cast<std::int64_t>(length));
}

}  // namespace

void barrier(Group& group, const std::string& what) {
  RECORD_USER_SCOPE("tessera::wait");
  const TraceScope traced(TraceRow::kWaits, what);
  issue_and_wait(group, Kind::kAllReduce, Combine{at::zeros({1}, at::kByte)}, what);
}

std::vector<bool> any_of_ranks(Group& group, const std::vector<bool>& mine,
                               const std::string& what) {
  RECORD_USER_SCOPE("tessera::wait");
  constexpr std::size_t kBits = 8;
  auto packed =
      at::zeros({static_cast<std::int64_t>((mine.size() + kBits - 1) / kBits)}, at::kByte);
  auto* bytes = packed.mutable_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (mine[i]) bytes[i / kBits] = static_cast<std::uint8_t>(bytes[i / kBits] | 1U << i % kBits);
  }
  issue_and_wait(group, Kind::kAnyOf, Combine{packed}, what);
  std::vector<bool> any(mine.size());
  for (std::size_t i = 0; i < mine.size(); ++i) any[i] = (bytes[i / kBits] >> i % kBits & 1U) != 0;
  return any;
}

std::vector<std::int64_t> sum_of_ranks(Group& group, const std::vector<std::int64_t>& mine,
                                       const std::string& what) {
  RECORD_USER_SCOPE("tessera::wait");
  const auto values = at::zeros({2, static_cast<std::int64_t>(mine.size())}, at::kLong);
  auto* sums = values.mutable_data_ptr<std::int64_t>();
  std::copy(mine.begin(), mine.end(), sums);
  issue_and_wait(group, Kind::kSumOf, Combine{values, Combine::Way::kSum}, what);
  return {sums, sums + mine.size()};
}

std::vector<bool> all_agree(Group& group, const std::vector<std::uint64_t>& hashes,
                            const std::string& what) {
  RECORD_USER_SCOPE("tessera::wait");
  // A bit that is set on one rank and clear on another comes out set in both halves.
  auto halves = at::empty({static_cast<std::int64_t>(2 * hashes.size())}, at::kLong);
  auto* half = halves.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    half[2 * i] = static_cast<std::int64_t>(hashes[i]);
    half[2 * i + 1] = static_cast<std::int64_t>(~hashes[i]);
  }
  issue_and_wait(group, Kind::kAnyOf, Combine{halves.view(at::kByte)}, what);
  std::vector<bool> agree(hashes.size());
  for (std::size_t i = 0; i < agree.size(); ++i) agree[i] = (half[2 * i] & half[2 * i + 1]) == 0;
  return agree;
}

void all_reduce(Group& group, at::Tensor data, const std::string& what) {
  RECORD_USER_SCOPE("tessera::wait");
  const TraceScope traced(TraceRow::kWaits, what);
  issue_and_wait(group, Kind::kAllReduce, AllReduce{std::move(data), {}, Route::kRelayed}, what);
}

std::vector<std::string> all_gather_fixed(Group& group, const std::string& mine,
                                          const std::string& what) {
  RECORD_USER_SCOPE("tessera::wait");
  return gather(group, mine, equal_lengths(group, mine.size()), what);
}

std::vector<std::string> all_gather_bytes(Group& group, const std::string& mine,
                                          const std::string& what) {
  RECORD_USER_SCOPE("tessera::wait");
  const TraceScope traced(TraceRow::kWaits, what);
  const auto size = static_cast<std::int64_t>(mine.size());
  const std::string own(reinterpret_cast<const char*>(&size), sizeof size);
  std::vector<std::int64_t> lengths;
  for (const auto& bytes : gather(group, own, equal_lengths(group, own.size()), what)) {
    std::memcpy(&lengths.emplace_back(), bytes.data(), sizeof size);
  }
  return gather(group, mine, lengths, what);
}

std::optional<Difference> first_that_differs(Group& group, const std::string& mine,
                                             const std::string& what) {
  const std::uint64_t hash = hash_bytes(mine);
  const std::string own(reinterpret_cast<const char*>(&hash), sizeof hash);
  const auto hashes = all_gather_fixed(group, own, what);
  const auto other = std::find_if(hashes.begin(), hashes.end(),
                                  [&](const auto& one) { return one != hashes.front(); });
  if (other == hashes.end()) return std::nullopt;
  const auto rank = static_cast<int>(other - hashes.begin());
  const bool tells = group.rank() == 0 || group.rank() == rank;
  auto texts = all_gather_bytes(group, tells ? mine : std::string(), what);
  return Difference{rank, std::move(texts.front()),
                    std::move(texts[static_cast<std::size_t>(rank)])};
}

namespace {

/// An error as bytes: its kind, then the message; empty = none.
std::string encode(const std::exception& error) {
  const auto* known = dynamic_cast<const Error*>(&error);
  const ErrorKind kind = known == nullptr ? ErrorKind::kInternal : known->kind();
  return static_cast<char>('0' + static_cast<int>(kind)) + one_line(error.what());
}

ErrorKind kind_in(const std::string& bytes) { return static_cast<ErrorKind>(bytes.front() - '0'); }

/// A rank matters where machines differ, not where the same was requested of all ranks.
[[noreturn]] void rethrow(const std::string& bytes, std::size_t rank, bool of_all) {
  const auto kind = kind_in(bytes);
  const bool named = kind == ErrorKind::kIo && !of_all;
  throw Error(kind, concat(named ? concat("rank ", rank, ": ") : "", bytes.substr(1)));
}

}  // namespace

void on_all_or_none(World& world, const std::string& what, const std::function<void()>& action) {
  std::string mine;
  world.work_at(what);
  try {
    action();
  } catch (const std::exception& error) {
    if (base::handles_interrupt()) throw;  // the World is aborted: no rank waits for a message
    mine = encode(error);
  }
  world.work_at("");
  if (!any_of_ranks(world.control(), {!mine.empty()}, what)[0]) return;
  const auto all = all_gather_bytes(world.control(), mine, what);
  const auto failed =
      std::find_if(all.begin(), all.end(), [](const auto& one) { return !one.empty(); });
  const auto equal = static_cast<std::size_t>(std::count(all.begin(), all.end(), *failed));
  rethrow(*failed, static_cast<std::size_t>(failed - all.begin()), equal == all.size());
}

std::exception_ptr shared_refusal(Group& group, int world_rank, const std::exception_ptr& mine,
                                  const std::string& what) {
  std::string bytes;
  try {
    if (mine) std::rethrow_exception(mine);
  } catch (const std::exception& error) {
    if (base::handles_interrupt()) throw;
    bytes = encode(error);
    bytes.insert(1, concat("rank ", world_rank, ": "));
  }
  const auto all = all_gather_bytes(group, bytes, what);
  const auto first = std::ranges::find_if(all, [](const auto& one) { return !one.empty(); });
  if (first == all.end()) return nullptr;
  try {
    // The first rank that throws may end the World, so all ranks have to arrive here first.
    barrier(group, what);
  } catch (const LostRank&) {
    // A rank has ended the World.
  }
  if (mine) return mine;
  return std::make_exception_ptr(Error(kind_in(*first), first->substr(1)));
}

std::vector<int> all_ranks(int size) {
  std::vector<int> all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::string from_first_rank(World& world, const std::string& what, const std::string& text) {
  return all_gather_bytes(world.control(), world.rank() == 0 ? text : std::string(), what).front();
}

}  // namespace tessera::comm
