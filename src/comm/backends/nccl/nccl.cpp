#include "comm/backends/nccl/nccl.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "base/environment.h"
#include "base/text/printable.h"
#include "comm/backends/entry_record.h"
#include "comm/backends/gloo/gloo.h"
#include "comm/backends/nccl/nccl_backends.h"
#include "comm/backends/nccl/nccl_device.h"
#include "comm/backends/nccl/nccl_p2p.h"
#include "comm/batch.h"
#include "comm/buffer_pool.h"
#include "comm/device.h"
#include "comm/host_read.h"
#include "comm/ops/device_leases.h"
#include "launch/hosts.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Started = c10::intrusive_ptr<c10d::Work>;

/// Makes c10d run the collective on the current stream; it returns no Work then.
template <class Options>
Options on_this_stream() {
  Options options;
  options.asyncOp = false;
  return options;
}

/// Work that was launched completely on the group's stream.
class NcclWork final : public Work {
 public:
  struct Launched {
    Batch batch;  ///< keeps the tensors that are read and written
    Event end;
    at::Device device;
    std::shared_ptr<const AbortFlag> abort_flag;
  };
  explicit NcclWork(Launched launched) : launched_(std::move(launched)) {}
  ~NcclWork() override {
    if (done_) return;
    try {
      order_after_end();
    } catch (...) {
      // An error is propagating already, so no caller has waited for this work.
    }
  }

  /// Makes the caller's stream wait; the host continues.
  void wait() override {
    if (done_) return;
    launched_.abort_flag->check();
    order_after_end();
    launched_.batch.ops.clear();
    done_ = true;
  }

 private:
  void order_after_end() const {
    launched_.end.block(Stream::current(launched_.device), EventSite::kWorkEnd);
  }

  Launched launched_;
  bool done_ = false;
};

/// Launches one batch: NCCL's call for each op, then what is left to do after all of these.
/// Everything goes to the current stream, which is the group's.
///
/// Memory is taken first. An error then leaves nothing half sent, and leaves no group of NCCL's
/// calls open, in which nothing else that this thread launches would ever start.
class Launch {
 public:
  /// `pool` is made when an op first needs memory: it takes one of the device's few streams.
  Launch(c10d::ProcessGroupNCCL& nccl, std::unique_ptr<BufferPool>& pool, const Group& group)
      : nccl_(nccl),
        pool_(pool),
        device_(group.stream().device()),
        ranks_(group.size()),
        rank_(group.rank()) {}
  ~Launch() {
    if (leases_.empty()) return;
    try {
      end();
    } catch (...) {
      // The device no longer answers: its memory is lost with it.
    }
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  void run(const Batch& batch) {
    for (const Op& op : batch.ops) std::visit(*this, op);
    together_ = calls_.size() > 1;
    if (together_) nccl_.startCoalescing();
    for (const auto& call : std::exchange(calls_, {})) call();
    if (std::exchange(together_, false)) came(nccl_.endCoalescing());
    for (const auto& next : std::exchange(left_, {})) next();
  }
  /// Records the event after which the batch's memory is free.
  Event end() {
    Event end;
    end.record(Stream::current(device_), EventSite::kWorkEnd);
    for (at::Tensor& lease : leases_) pool_->recycle(std::move(lease), end);
    leases_.clear();
    return end;
  }

  void operator()(const AllGather& op) {
    calls_.emplace_back([this, all = op.buffer.view(-1)] { gather(all); });
  }

  // NCCL adds in the dtype that travels, in an order of its own. Where the sum's dtype is wider,
  // addends travel in theirs and are added here, in rank order: the bits are those of the other
  // backends.
  void operator()(const ReduceScatter& op) {
    const at::Tensor input = op.input.view(-1), output = op.output.view(-1);
    const std::vector<at::Tensor> taken = leased(op);
    if (input.scalar_type() != output.scalar_type()) {
      calls_.emplace_back([this, all = taken[0], input] { all_to_all(all, input, {}, {}); });
    } else {
      calls_.emplace_back(
          [this, sum = taken.empty() ? output : taken[0], addends = input]() mutable {
            came(nccl_._reduce_scatter_base(sum, addends,
                                            on_this_stream<c10d::ReduceScatterOptions>()));
          });
    }
    if (!taken.empty()) left_.emplace_back([this, op, taken] { sum_leased(op, taken, ranks_); });
  }

  void operator()(const AllReduce& op) {
    const at::Tensor data = op.data.view(-1), result = op.result().view(-1);
    if (data.scalar_type() == result.scalar_type()) {
      if (op.output.defined()) result.copy_(data);
      calls_.emplace_back([this, summed = std::vector<at::Tensor>{result}]() mutable {
        came(nccl_.allreduce(summed, on_this_stream<c10d::AllreduceOptions>()));
      });
    } else if (in_two_rounds(op, ranks_)) {
      sum_in_parts(op);
    } else {
      const std::vector<at::Tensor> taken = leased(op);
      taken[0].narrow(0, data.numel() * rank_, data.numel()).copy_(data);
      calls_.emplace_back([this, all = taken[0]] { gather(all); });
      left_.emplace_back([this, op, taken] { sum_leased(op, taken, ranks_, rank_); });
    }
  }

  void operator()(const AllToAll& op) {
    calls_.emplace_back([this, output = op.output.view(-1), input = op.input.view(-1),
                         receives = op.receives,
                         sends = op.sends] { all_to_all(output, input, receives, sends); });
  }
  void operator()(const Broadcast& op) {
    calls_.emplace_back(
        [this, data = std::vector<at::Tensor>{as_bytes(op.data)}, source = op.source]() mutable {
          auto from = on_this_stream<c10d::BroadcastOptions>();
          from.rootRank = source;
          came(nccl_.broadcast(data, from));
        });
  }
  void operator()(const RelayedGather&) { refuse(); }
  void operator()(const Combine&) { refuse(); }

 private:
  /// Takes the blocks of device_leases().
  template <class Op>
  std::vector<at::Tensor> leased(const Op& op) {
    std::vector<at::Tensor> taken;
    for (const DeviceLease& lease : device_leases(op, ranks_, rank_)) {
      if (!pool_) pool_ = std::make_unique<BufferPool>(device_);
      taken.push_back(leases_.emplace_back(pool_->take(lease.numel, lease.dtype)));
    }
    return taken;
  }

  /// Views a tensor that is moved and not added: NCCL has no 16-bit integers, which users have.
  static at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view(-1).view(at::kByte); }

  void came(const Started& work) const {
    if (work && !together_) work->wait();  // makes this stream wait, not the host
  }
  void gather(const at::Tensor& elements) {
    at::Tensor all = as_bytes(elements);
    const std::int64_t slice = all.numel() / ranks_;
    at::Tensor mine = all.narrow(0, slice * rank_, slice);  // NCCL's in-place form
    came(nccl_._allgather_base(all, mine, on_this_stream<c10d::AllgatherOptions>()));
  }
  void all_to_all(at::Tensor output, at::Tensor input, std::vector<std::int64_t> receives,
                  std::vector<std::int64_t> sends) {
    came(nccl_.alltoall_base(output, input, receives, sends,
                             on_this_stream<c10d::AllToAllOptions>()));
  }

  /// Each rank sums one part and sends the sum to all others.
  void sum_in_parts(const AllReduce& op) {
    const std::int64_t mine = part_of_rank(op, ranks_, rank_);
    std::vector<std::int64_t> sends;
    for (int rank = 0; rank < ranks_; ++rank) sends.push_back(part_of_rank(op, ranks_, rank));
    const std::vector<at::Tensor> taken = leased(op);
    calls_.emplace_back([this, received = taken[0], data = op.data.view(-1), mine, sends] {
      all_to_all(received, data, std::vector(static_cast<std::size_t>(ranks_), mine), sends);
    });
    left_.emplace_back([this, op, taken] {
      sum_leased(op, taken, ranks_, rank_);
      gather(taken[1]);
      take_gathered(op, taken);
    });
  }

  [[noreturn]] static void refuse() {
    throw Error(ErrorKind::kInternal,
                "nccl: found a message that is relayed in the memory of the host");
  }

  c10d::ProcessGroupNCCL& nccl_;
  std::unique_ptr<BufferPool>& pool_;
  const at::Device device_;
  const int ranks_;
  const int rank_;
  bool together_ = false;
  std::vector<std::function<void()>> calls_;
  std::vector<std::function<void()>> left_;
  std::vector<at::Tensor> leases_;
};

class NcclGroup final : public Group {
 public:
  /// `backend` is null for a group of messages. `entries` is a group of the same ranks in the
  /// host's memory, where entries are compared.
  NcclGroup(NcclPlace place, NcclBackend backend, std::shared_ptr<Group> entries)
      : place_(std::move(place)),
        entries_(std::move(entries)),
        log_(std::make_shared<FlightRecorder>(name(), place_.channel.board.get())),
        backend_(std::move(backend)) {
    place_.channel.board->add(log_);
  }
  ~NcclGroup() override { place_.channel.board->remove(*log_); }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  int rank() const override { return place_.channel.self; }
  int size() const override { return static_cast<int>(place_.channel.members.size()); }
  const std::string& name() const override { return place_.channel.name; }

  P2P& p2p() override {
    if (!p2p_) p2p_ = open_nccl_p2p(place_, host_waits());
    return *p2p_;
  }

 private:
  std::unique_ptr<Work> start(Batch batch) override {
    require_no_p2p(p2p_.get(), name());
    TESSERA_INVARIANT(backend_, "group ", name(), ": found a collective, expected messages alone");
    place_.channel.abort_flag->check();
    check_batch(batch, size(), place_.device);
    const auto entry = log_->record(batch, next_sequence_++);
    if (entries_) compare(*entry);
    Launching launching(host_waits(), {[log = log_, entry] { return log->wait_for(*entry); },
                                       [backend = backend_] { return error_of(*backend); }});
    Launch launch(*backend_, pool_, *this);
    try {
      launch.run(batch);
    } catch (const Error&) {
      throw;
    } catch (const c10::OutOfMemoryError&) {
      throw;  // the error of this rank; its type says so
    } catch (const std::exception& error) {
      throw LostRank(concat(log_->wait_for(*entry).text, ": ", one_line(error.what())));
    }
    const Event end = launch.end();
    launching.launched(end);
    return std::make_unique<NcclWork>(
        NcclWork::Launched{std::move(batch), end, place_.device, place_.channel.abort_flag});
  }

  void compare(const Entry& entry) {
    EntryRecord mine;
    write_record(entry, mine);
    const std::string bytes(reinterpret_cast<const char*>(&mine), sizeof mine);
    std::vector<EntryRecord> records;
    for (const std::string& one : all_gather_fixed(*entries_, bytes, "entries")) {
      std::memcpy(&records.emplace_back(), one.data(), sizeof mine);
    }
    require_same_entries(records, rank(), place_.channel.members, name());
  }

  const NcclPlace place_;
  const std::shared_ptr<Group> entries_;
  const std::shared_ptr<FlightRecorder> log_;
  const NcclBackend backend_;
  std::unique_ptr<BufferPool> pool_;
  std::uint64_t next_sequence_ = 0;
  std::unique_ptr<P2P> p2p_;
};

class NcclConnections final : public Connections {
 public:
  explicit NcclConnections(const LaunchEnvironment& launch) : launch_(launch) {}

  std::shared_ptr<Group> make_group(const GroupPlace& place) override {
    if (!claimed_) {
      claim_device(*place.store, running_kernel(), pci_id(place.device), place.rank);
      claimed_ = true;
    }
    meet_on_board(*place.board, [&] {
      place.store->meet(concat("group ", place.name), place.rank, place.ranks,
                        place.options.init_timeout, *place.abort_flag);
    });
    patience_ = place.options.timeout;
    NcclPlace here{channel_options(place),
                   place.store->for_group(concat("nccl/", place.name), place.abort_flag),
                   place.device, place.options.init_timeout, made_};
    // Messages have separate communicators (nccl_p2p.h).
    if (purpose_of(place.name) == kMessages) {
      return std::make_shared<NcclGroup>(std::move(here), NcclBackend(), nullptr);
    }
    NcclBackend& backend = backends_[place.ranks];
    if (!backend) backend = connected(here);
    std::shared_ptr<Group> entries;
    if (here.channel.compare_entries) entries = messages_of(place);
    return std::make_shared<NcclGroup>(std::move(here), backend, std::move(entries));
  }
  void require_recovery() const override {
    throw Error(
        ErrorKind::kUsage,
        "recover: found backend nccl, expected gloo or ranks that are threads: NCCL does not "
        "connect its ranks again; start the run again, from its last checkpoint");
  }
  void close() override {
    made_->close(patience_);
    if (messages_) messages_->close();
  }

 private:
  /// Returns the group of the same ranks over Gloo.
  std::shared_ptr<Group> messages_of(const GroupPlace& place) {
    if (!messages_) messages_ = open_gloo(launch_);
    GroupPlace there = place;
    there.name = concat(place.name, ", entries");
    there.device = at::kCPU;
    return messages_->make_group(there);
  }

  /// Connects the ranks now and not in the first step, since that takes seconds.
  static NcclBackend connected(const NcclPlace& place) {
    const int ranks = static_cast<int>(place.channel.members.size());
    const auto backend = place.backends->make(place.store, place.channel.self, ranks, place.device,
                                              StreamUse::kRank);
    connect_in_time(place, concat("group ", place.channel.name),
                    [backend, ranks, device = place.device] {
                      backend->eagerConnectSingleDevice(device);
                      meet_once(*backend, ranks, device);
                    });
    return backend;
  }

  /// Makes NCCL connect rings and pairs, which it does in the first collective that needs them.
  static void meet_once(c10d::ProcessGroupNCCL& nccl, int ranks, at::Device device) {
    at::Tensor mine = at::zeros({1}, at::TensorOptions(device));
    at::Tensor all = at::zeros({ranks}, mine.options());
    at::Tensor others = at::zeros_like(all);
    std::vector<std::int64_t> equal_parts;
    nccl._allgather_base(all, mine, on_this_stream<c10d::AllgatherOptions>());
    nccl._reduce_scatter_base(mine, all, on_this_stream<c10d::ReduceScatterOptions>());
    nccl.alltoall_base(others, all, equal_parts, equal_parts,
                       on_this_stream<c10d::AllToAllOptions>());
  }

  const std::shared_ptr<NcclBackends> made_ = std::make_shared<NcclBackends>();
  /// Groups of the same ranks share one communicator, so its collectives have one order everywhere.
  std::map<std::vector<int>, NcclBackend> backends_;
  bool claimed_ = false;
  std::chrono::milliseconds patience_{0};
  const LaunchEnvironment launch_;
  std::unique_ptr<Connections> messages_;
};

/// Keeps c10d's watchdog from ending the process. It does so where a collective takes too long or a
/// device fails, before this rank can say which and before the other ranks know.
void keep_watchdog_still() {
  for (const char* const name :
       {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"}) {
    base::set_environment_variable(name, "0");
  }
}

/// Sets the variable unless the user has set it.
void set_default(const char* name, const char* value) {
  if (!base::environment_variable(name)) base::set_environment_variable(name, value);
}

void set_defaults() {
  // Otherwise its threads sleep for minutes after a failure, and its destructors wait for them, to
  // make a report of what this rank reports itself.
  set_default("TORCH_NCCL_DUMP_ON_TIMEOUT", "0");
  set_default("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0");
  // With it, several communicators begin on the device in the order in which the rank has launched
  // on them; two ranks whose devices took them in different orders would wait for each other. With
  // older drivers NCCL makes each end before the next one begins (getImplicitOrder in its
  // src/enqueue.cc), so two ranks of a pipeline that send to each other would never receive.
  constexpr int kBeginsInOrder = 12030;
  if (version_of_driver() >= kBeginsInOrder) set_default("NCCL_LAUNCH_ORDER_IMPLICIT", "1");
}

}  // namespace

std::unique_ptr<Connections> open_nccl(const LaunchEnvironment& launch) {
  require_nccl_device();
  keep_watchdog_still();
  set_defaults();
  return std::make_unique<NcclConnections>(launch);
}

}  // namespace tessera::comm
