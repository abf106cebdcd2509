#include "comm/p2p.h"

#include <ATen/record_function.h>

#include <bit>
#include <utility>

#include "base/test_hooks.h"
#include "base/trace.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::comm {
namespace {

bool is_forward(const P2PTag& tag) { return tag.direction == P2PTag::Direction::kForward; }

/// The name in the format that pipeline/slot_trace.h reads: "1SEND_F3", "2RECV_F3". The stage is
/// that of this end.
std::string name_in_trace(const P2POp& op) {
  const P2PTag& tag = op.tag;
  const int receiver = tag.stage + (is_forward(tag) ? 1 : -1);
  return concat(op.sends() ? tag.stage : receiver, op.sends() ? "SEND_" : "RECV_",
                is_forward(tag) ? 'F' : 'B', tag.micro_batch);
}

}  // namespace

/// One end of a message in a traced step, from its posting until this rank knows that it has ended.
/// Made only while there is a trace.
class TracedMessage {
 public:
  /// Returns null where nothing is traced.
  static std::unique_ptr<TracedMessage> of(const P2POp& op) {
    Trace* const trace = current_trace();
    if (trace == nullptr) return nullptr;
    auto traced = std::make_unique<TracedMessage>();
    traced->trace_ = trace->shared_from_this();
    traced->span_ = {TraceRow::kMessages,
                     name_in_trace(op),
                     TraceClock::now(),
                     {},
                     {{"tensor", std::int64_t{op.tag.index}},
                      {"bytes", static_cast<std::int64_t>(op.tensor.nbytes())}}};
    return traced;
  }

  void ended() {
    span_.end = TraceClock::now();
    trace_->add(std::move(span_));
  }
  void waited_since(TraceClock::time_point begin) {
    const auto end = TraceClock::now();
    trace_->add({TraceRow::kWaits, span_.name, begin, end, {}});
    const std::chrono::duration<double, std::milli> waited = end - begin;
    span_.arguments.emplace_back("waited_ms", waited.count());
    ended();
  }

 private:
  std::shared_ptr<Trace> trace_;
  TraceSpan span_;
};

std::string to_string(const P2PTag& tag) {
  return concat(is_forward(tag) ? "activations" : "gradients", " of stage ", tag.stage,
                ", micro-batch ", tag.micro_batch, ", step ", tag.step,
                tag.index == 0 ? "" : concat(", tensor ", tag.index));
}

int message_number(const P2PTag& tag, const P2PExtent& extent, std::uint64_t fingerprint) {
  constexpr int kBits = 31;
  const auto bits_below = [](std::int64_t end) {
    return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(end - 1)));
  };
  const std::int64_t cell = std::int64_t{tag.stage} * extent.micro_batches + tag.micro_batch;
  const int cell_bits = bits_below(std::int64_t{extent.stages} * extent.micro_batches);
  const int exact_bits = 1 + cell_bits + bits_below(P2PExtent::kTensors);
  std::uint64_t exact = static_cast<std::uint64_t>(tag.direction);
  exact = exact << cell_bits | static_cast<std::uint64_t>(cell);
  exact = exact * P2PExtent::kTensors + static_cast<std::uint64_t>(tag.index);
  const int hash_bits = kBits - exact_bits;
  const std::uint64_t hash = fingerprint & ((std::uint64_t{1} << hash_bits) - 1);
  return static_cast<int>(exact << hash_bits | hash);
}

std::string to_string(const P2POp& op) {
  const at::Tensor& tensor = op.tensor;
  return concat(to_string(op.tag), op.sends() ? ", to rank " : ", from rank ", op.peer_rank,
                tensor.defined()
                    ? concat(" (", tensor.sizes(), " ", c10::toString(tensor.scalar_type()), ")")
                    : "");
}

DeviceWork work_of(const P2POp& op, std::function<std::string()> error) {
  P2POp named = op;
  named.tensor.reset();
  // It names no rank to the failure watch: work that is queued on a device is on no rank's board,
  // and the rank that launched it may already wait for something else.
  return {[named = std::move(named)] {
            return PeerWait{0, 0, -1, concat("the message of ", to_string(named))};
          },
          std::move(error)};
}

void order_after(const P2POp& op, const Event& end, HostWaits* waits,
                 std::function<std::string()> error) {
  // It is recorded when it is waited for, and not when it is posted: a receive may be posted long
  // before its sender has something to send.
  if (waits != nullptr) waits->waited_for(work_of(op, std::move(error)), end);
  end.block(Stream::current(op.stream.device()), EventSite::kP2PEnd);
}

void require_no_p2p(const P2P* p2p, const std::string& group) {
  TESSERA_INVARIANT(p2p == nullptr, "group ", group,
                    ": found a collective, expected messages only");
}

LostRank lost_in_recovery(const P2POp& op) {
  return LostRank(concat(to_string(op), ": lost when the World was recovered"));
}

std::string waited_in_vain(const P2POp& op, std::chrono::milliseconds time, int rank,
                           const Patience& patience) {
  const std::string works = patience.works_of({rank});
  return concat(
      to_string(op), ": waited ", in_seconds(time), " for rank ", rank,
      works.empty() ? "; it is stalled, or does not post its end of this message" : works);
}

Transfer::Transfer(const P2PPlace& place, std::shared_ptr<PostedOp> posted)
    : abort_flag_(place.abort_flag), waits_(place.waits), posted_(std::move(posted)) {}

Transfer::~Transfer() {
  if (!posted_ || !posted_->op().stream) return;
  try {
    posted_->let_go(Stream::current(posted_->op().stream.device()));
  } catch (...) {
    // An error is propagating already, so no caller has waited for this message.
  }
}

void Transfer::wait() {
  RECORD_USER_SCOPE("tessera::wait");
  const auto begin = traced_ ? TraceClock::now() : TraceClock::time_point();
  try {
    if (posted_) {
      const Event end = posted_->finish();
      const P2POp& op = posted_->op();
      if (op.stream) order_after(op, end, waits_.get(), posted_->error());
      posted_.reset();
    }
  } catch (const LostRank& error) {
    abort_flag_->suspect(error.what());
    throw;
  }
  if (traced_) std::exchange(traced_, nullptr)->waited_since(begin);
}

bool Transfer::done() {
  try {
    if (posted_) {
      const auto end = posted_->poll();
      if (!end || !end->done()) return false;
      posted_.reset();
    }
  } catch (const LostRank& error) {
    abort_flag_->suspect(error.what());
    throw;
  }
  if (traced_) std::exchange(traced_, nullptr)->ended();
  return true;
}

P2P::P2P(P2PPlace place) : place_(std::move(place)) {}

P2P::~P2P() = default;

std::unique_ptr<Transfer> P2P::checked_and_posted(P2POp::End end, int peer, const P2PTag& tag,
                                                  at::Tensor tensor) {
  TESSERA_INVARIANT(peer >= 0 && peer < size() && peer != rank(), to_string(tag), ": found index ",
                    peer, " for the other end, expected one below ", size(), " that is not ",
                    rank());
  TESSERA_INVARIANT(tensor.defined() && tensor.layout() == c10::kStrided &&
                        tensor.device() == place_.device && tensor.is_contiguous(),
                    to_string(tag),
                    ": found a tensor that is undefined, sparse, elsewhere or not contiguous, "
                    "expected x.contiguous() on ",
                    place_.device);
  TESSERA_INVARIANT(tag.stage >= 0 && tag.stage < extent_.stages && tag.micro_batch >= 0 &&
                        tag.micro_batch < extent_.micro_batches && tag.index >= 0 &&
                        tag.index < P2PExtent::kTensors,
                    to_string(tag),
                    ": found numbers beyond those of the step, expected fewer than ",
                    extent_.stages, " stages, ", extent_.micro_batches, " micro-batches and ",
                    P2PExtent::kTensors, " tensors");
  P2POp op{end, tag, peer, place_.members[static_cast<std::size_t>(peer)], std::move(tensor)};
  op.extent = extent_;
  if (place_.abort_flag && place_.abort_flag->is_set()) place_.abort_flag->raise(to_string(op));
  if (!place_.device.is_cpu()) put_on_stream(op);
  if (const auto hook = test_hooks::posts_message.get(); hook && !(*hook)(tag, op.sends())) {
    return std::make_unique<Transfer>(place_, nullptr);
  }
  auto traced = TracedMessage::of(op);
  auto transfer = post(std::move(op));
  transfer->traced_ = std::move(traced);
  return transfer;
}

void P2P::put_on_stream(P2POp& op) {
  Stream& stream = streams_[{op.peer, op.tag.direction, op.end}];
  if (!stream) stream = Stream::make(place_.device, StreamUse::kOtherRanks);
  op.stream = stream;
  op.posted.record(Stream::current(place_.device), EventSite::kP2PPost);
}

std::unique_ptr<Transfer> P2P::send(int to, const P2PTag& tag, const at::Tensor& tensor) {
  return checked_and_posted(P2POp::End::kSend, to, tag, tensor);
}

std::unique_ptr<Transfer> P2P::receive(int from, const P2PTag& tag, at::Tensor into) {
  return checked_and_posted(P2POp::End::kReceive, from, tag, std::move(into));
}

std::shared_ptr<P2P> p2p_of(World& world, const std::vector<int>& ranks) {
  const auto group = world.group(ranks, kMessages);
  return {group, &group->p2p()};
}

}  // namespace tessera::comm
