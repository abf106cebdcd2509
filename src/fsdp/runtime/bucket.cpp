#include "fsdp/runtime/bucket.h"

#include <ATen/ATen.h>

#include "comm/host_read.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/torch_dtype.h"
#include "kernels/kernels.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::fsdp {
namespace {

void mark_difference(const at::Tensor& mark, const at::Tensor& one, const at::Tensor& other) {
  const at::Tensor bytes = one.view(at::kByte), others = other.view(at::kByte);
  if (!bytes.is_cpu()) {
    mark.logical_or_(bytes.ne(others).any());
  } else if (!at::equal(bytes, others)) {
    mark.fill_(1);
  }
}

}  // namespace

Bucket::Bucket(Unit& unit, layout::BucketPlan plan, BucketGroups groups, int rank)
    : unit_(unit),
      plan_(std::move(plan)),
      parameters_(plan_.parameters.size()),
      groups_(groups),
      rank_(rank),
      pool_(unit.runtime().pool()),
      unsharded_(pool_, to_scalar_type(plan_.key.compute), plan_.numel, plan_.ranks, rank,
                 unit.released_message()),
      arrived_(plan_.parameters.size(), 0),
      made_on_(current_stream()) {
  const auto& key = plan_.key;
  shard_ = make(plan_.slice_numel(), key.storage).zero_();
  aliases_shard_ = plan_.ranks == 1 && key.storage == key.compute;
  if (aliases_shard_) unsharded_.alias(shard_);
}

Bucket::~Bucket() {
  if (!made_on_) return;
  try {
    drop_gradients();
    comm::order(current_stream(), made_on_, comm::EventSite::kPoolFree);
  } catch (const std::exception&) {
    // The device no longer answers; its memory is lost.
  }
}

at::Tensor Bucket::make(std::int64_t numel, DType dtype) const {
  at::Tensor made;
  {
    const comm::StreamScope there(made_on_);
    made = at::empty({numel},
                     at::TensorOptions().dtype(to_scalar_type(dtype)).device(pool_->device()));
  }
  if (made_on_) comm::order(made_on_, current_stream(), comm::EventSite::kPoolMade);
  return made;
}

bool Bucket::frees_sums() const {
  return static_cast<bool>(made_on_) || unit_.runtime().frees_gradients();
}

bool Bucket::sum_is_final() const {
  return groups_.replicas == nullptr && plan_.key.final == plan_.key.accumulate &&
         plan_.key.reductions.divide_factor == 1.0;
}

void Bucket::set_divide_factor(double factor) {
  plan_.key.reductions.divide_factor = factor;
  if (sum_is_final()) final_ = at::Tensor();
}

at::Tensor Bucket::shard_of(const layout::Placed& placed) const {
  const auto owned = plan_.owned(placed, rank_);
  return shard_.narrow(0, owned.empty() ? 0 : plan_.offset_in_slice(placed, rank_), owned.size());
}

void Bucket::begin_gather(comm::Batch& batch) {
  if (aliases_shard_) return;
  const bool is_of_group = groups_.gather != nullptr && groups_.gather->stream();
  unsharded_.begin(is_of_group ? groups_.gather->stream() : current_stream());
  if (groups_.gather != nullptr) batch.ops.emplace_back(gather());
}

void Bucket::fill_gather() const {
  if (!aliases_shard_) encode(unsharded_.writable_slice());
}

void Bucket::encode(const at::Tensor& slice) const {
  if (plan_.key.rounding == Rounding::kHalfAway) {
    kernels::round_half_away(shard_, slice);
  } else {
    slice.copy_(shard_);
  }
}

void Bucket::mark_stale(const at::Tensor& mark) const {
  if (aliases_shard_) return;
  const auto slice = unsharded_.writable_slice();
  auto now = shard_;
  if (slice.scalar_type() != shard_.scalar_type()) {
    now = pool_->take(slice.numel(), slice.scalar_type());
    encode(now);
  }
  mark_difference(mark, slice, now);
  if (!now.is_same(shard_)) pool_->recycle(std::move(now));
}

comm::AllGather Bucket::gather() const {
  auto op = unsharded_.gather();
  op.bucket = number_;
  return op;
}

void Bucket::ensure_accumulator() {
  if (accumulator_.defined()) return;
  const auto numel = groups_.reduce == nullptr ? plan_.numel : plan_.slice_numel();
  accumulator_ = make(numel, plan_.key.accumulate);
  // Makes the host's pages here, not in the middle of a step. The zeros themselves are not needed:
  // a sum overwrites the memory, with zeros for parameters without gradients.
  if (!frees_sums()) accumulator_.zero_();
}

void Bucket::ensure_slots() {
  if (slots_.defined()) return;
  TESSERA_INVARIANT(!wire_.defined(),
                    "a gradient arrived while its bucket's reduction is under way");
  const bool in_sum = groups_.reduce == nullptr;
  if (!in_sum || !accumulator_.defined()) {  // new memory, which no stream has used
    slot_uses_.clear();
    slot_uses_.note(current_stream());
  }
  if (in_sum) {
    ensure_accumulator();
    slots_ = accumulator_;
  } else {
    slots_ = pool_->take(plan_.numel, to_scalar_type(plan_.key.accumulate));
  }
}

at::Tensor Bucket::slot(std::size_t index) const {
  const auto& placed = plan_.parameters[index];
  return slots_.narrow(0, placed.offset, placed.numel);
}

bool Bucket::is_empty(std::size_t index) const {
  // Slots that are the accumulator may hold a sum of earlier backwards, with zeros in reset ranges.
  return arrived_[index] == 0 && !(groups_.reduce == nullptr && has_sum_);
}

bool Bucket::is_shared(std::size_t index) const {
  return std::ranges::find(shared_slots_, index) != shared_slots_.end();
}

void Bucket::add_here(std::size_t index) {
  const auto here = current_stream();
  if (!here) return;
  added_on_.resize(plan_.parameters.size());
  slot_uses_.enter(here, comm::EventSite::kAccept);
  comm::order(added_on_[index], here, comm::EventSite::kAccept);
  added_on_[index] = here;
}

void Bucket::set_parameter(std::size_t index, Parameter& parameter) {
  parameters_.at(index) = &parameter;
}

void Bucket::expect_gradient(std::size_t index) {
  TESSERA_CHECK(unit_.expects_gradients(), ErrorKind::kContract, "gradient of ",
                parameters_[index]->contract.name,
                ": found one outside an open forward of its unit ", unit_.shown_name(),
                ", expected one after a sharded forward; call what fully_shard returned");
  unit_.runtime().on_gradient();
}

void Bucket::note_arrival(std::size_t index) {
  add_here(index);
  unit_.note_reader();  // the kernels before this point read the unit's parameters
  arrived_[index] = 1;
  parameters_[index]->used = true;
}

grad::SlotOwner::View Bucket::open_slot(std::size_t index) {
  expect_gradient(index);
  // A reduction of an earlier micro-batch may still use the slots.
  if (is_reducing()) unit_.runtime().free_slots_of(unit_);
  TESSERA_INVARIANT(!is_shared(index), "a gradient arrived while a kernel writes its slot");
  ensure_slots();
  const bool first = is_empty(index);
  note_arrival(index);
  return {slot(index), first};
}

void Bucket::tickets_changed(int delta) { unit_.tickets_changed(delta); }

at::Tensor Bucket::share_slot(std::size_t index) {
  expect_gradient(index);
  if (is_reducing() || is_shared(index) || !is_empty(index)) return {};
  ensure_slots();
  add_here(index);
  shared_slots_.push_back(index);
  return slot(index);
}

void Bucket::end_share(std::size_t index, bool arrived) {
  TESSERA_INVARIANT(std::erase(shared_slots_, index) == 1,
                    "the share of a slot that is not shared has ended");
  if (arrived) note_arrival(index);
}

void Bucket::join_slots() { slot_uses_.join(current_stream(), comm::EventSite::kAccept); }

bool Bucket::has_arrivals() const {
  return std::any_of(arrived_.begin(), arrived_.end(), [](auto a) { return a != 0; });
}

void Bucket::zero_what_did_not_arrive(const at::Tensor& slots) const {
  std::int64_t filled = 0;
  for (std::size_t i = 0; i <= plan_.parameters.size(); ++i) {
    const bool last = i == plan_.parameters.size();
    const auto offset = last ? plan_.numel : plan_.parameters[i].offset;
    if (!last && arrived_[i] == 0) continue;
    if (offset > filled) slots.narrow(0, filled, offset - filled).zero_();
    if (!last) filled = std::max(filled, offset + plan_.parameters[i].numel);
  }
}

std::int64_t Bucket::begin_reduce(comm::Batch& batch) {
  TESSERA_INVARIANT(shared_slots_.empty(), "a reduction of slots that kernels are writing");
  ensure_slots();
  if (groups_.reduce == nullptr) {
    fill_reduce();
    has_sum_ = true;
    return 0;
  }
  if (plan_.key.reduce == plan_.key.accumulate) {
    wire_ = std::move(slots_);
    slots_ = at::Tensor();
  } else {
    const auto& stream = groups_.reduce->stream();
    wire_ = pool_->take(plan_.numel, to_scalar_type(plan_.key.reduce),
                        stream ? stream : current_stream());
  }
  ensure_accumulator();
  batch.ops.emplace_back(comm::ReduceScatter{
      wire_, accumulator_, has_sum_ ? comm::Into::kAdd : comm::Into::kOverwrite, number_});
  has_sum_ = true;
  return static_cast<std::int64_t>(wire_.nbytes());
}

void Bucket::fill_reduce() {
  slot_uses_.join(current_stream(), comm::EventSite::kAccept);
  const bool own_sum = groups_.reduce == nullptr;
  // All of the memory is summed, so all of it must be defined. An earlier sum of this rank stays.
  if (!(own_sum && has_sum_)) zero_what_did_not_arrive(slots_.defined() ? slots_ : wire_);
  std::fill(arrived_.begin(), arrived_.end(), std::uint8_t{0});
  if (!own_sum && slots_.defined()) {
    wire_.copy_(slots_);
    pool_->recycle(std::move(slots_));
  }
  slots_ = at::Tensor();
}

void Bucket::finish_reduce() {
  if (wire_.defined()) pool_->recycle(std::move(wire_));
  wire_ = at::Tensor();
}

void Bucket::reset_accumulator(std::size_t index) {
  arrived_[index] = 0;
  if (!has_sum_) return;
  const auto& placed = plan_.parameters[index];
  const auto owned = plan_.owned(placed, rank_);
  if (owned.empty()) return;
  join_slots();
  accumulator_.narrow(0, plan_.offset_in_slice(placed, rank_), owned.size()).zero_();
}

void Bucket::reset_accumulator() {
  has_sum_ = false;
  // The memory is not needed until gradients arrive again, so activations may use it before. A
  // device's allocator hands it out again at no cost; on the host the pages may have to be made
  // again.
  if (!frees_sums() || slots_.defined() || has_arrivals()) return;
  if (!accumulator_.defined() && !replica_sum_.defined() && !final_.defined()) return;
  join_slots();
  comm::order(current_stream(), made_on_, comm::EventSite::kPoolFree);
  accumulator_ = replica_sum_ = final_ = at::Tensor();
}

void Bucket::import_accumulator(std::size_t index, const at::Tensor& value) {
  const auto& placed = plan_.parameters[index];
  join_slots();
  ensure_accumulator();
  arrived_[index] = 0;
  if (!has_sum_) {
    // Where the slots are the accumulator, gradients of other parameters that wait there stay.
    groups_.reduce == nullptr ? zero_what_did_not_arrive(accumulator_)
                              : static_cast<void>(accumulator_.zero_());
  }
  has_sum_ = true;
  const auto owned = plan_.owned(placed, rank_);
  if (owned.empty()) return;
  auto range = accumulator_.narrow(0, plan_.offset_in_slice(placed, rank_), owned.size());
  if (groups_.replicas == nullptr || groups_.replicas->rank() == 0) {
    range.copy_(value);
  } else {
    range.zero_();  // the replica reduction adds rank 0's value
  }
}

void Bucket::leave_accumulator() {
  TESSERA_INVARIANT(!wire_.defined(), "a bucket in flight changed its accumulator");
  join_slots();
  const at::Tensor next = make(accumulator_.numel(), plan_.key.accumulate);
  accumulator_ = next.copy_(accumulator_);
  if (groups_.reduce == nullptr && slots_.defined()) slots_ = accumulator_;
}

void Bucket::leave_final_memory() {
  if (final_.is_same(replica_sum_)) replica_sum_ = at::Tensor();
  final_ = at::Tensor();
}

void Bucket::begin_replica_reduce(comm::Batch& batch) {
  if (groups_.replicas == nullptr) return;
  if (groups_.reduce == nullptr) join_slots();
  slot_uses_.note(groups_.replicas->stream());
  if (!replica_sum_.defined()) replica_sum_ = make(accumulator_.numel(), plan_.key.accumulate);
  // ReductionPlan::copies are added in the accumulation dtype: each copy's sum is a part of one
  // sum.
  if (plan_.key.reduce != plan_.key.accumulate && plan_.key.reductions.copies.empty()) {
    const auto& stream = groups_.replicas->stream();
    wire_ = pool_->take(accumulator_.numel(), to_scalar_type(plan_.key.reduce),
                        stream ? stream : current_stream());
  }
  batch.ops.emplace_back(comm::AllReduce{wire_.defined() ? wire_ : accumulator_, replica_sum_});
}

void Bucket::fill_replica_reduce() const {
  if (wire_.defined()) wire_.copy_(accumulator_);
}

const at::Tensor& Bucket::finish_final(double loss_scale) {
  TESSERA_INVARIANT(has_sum_, "a final gradient without a sum");
  if (groups_.reduce == nullptr) {
    join_slots();
  } else if (!slots_.defined()) {
    // This stream is ordered after the reductions, so a later clearing only waits for this stream.
    slot_uses_.clear();
    slot_uses_.note(current_stream());
  }
  final_is_accumulator_ = sum_is_final() && loss_scale == 1.0;
  if (final_is_accumulator_) return accumulator_;
  const auto& sum = groups_.replicas != nullptr ? replica_sum_ : accumulator_;
  const bool in_place = groups_.replicas != nullptr && plan_.key.final == plan_.key.accumulate;
  if (!final_.defined()) {
    final_ = in_place ? sum : make(plan_.slice_numel(), plan_.key.final);
    if (!in_place && !frees_sums()) final_.zero_();  // makes the pages, as in ensure_accumulator()
  }
  const auto factor = plan_.key.reductions.divide_factor * loss_scale;
  if (!in_place || factor != 1.0) kernels::divide_into(final_, sum, factor);
  return final_;
}

void Bucket::use_pool(const std::shared_ptr<comm::BufferPool>& pool) {
  TESSERA_INVARIANT(!slots_.defined() || groups_.reduce == nullptr,
                    "a bucket with gradients changed its pool");
  TESSERA_INVARIANT(!wire_.defined(), "a bucket in flight changed its pool");
  unsharded_.use_pool(pool);
  pool_ = pool;
}

void Bucket::drop_gradients() {
  // Collectives that no rank waits for may still write to the sums, which stay, or to memory that
  // the allocator gets.
  for (const auto* group : {groups_.reduce, groups_.replicas}) {
    if (group == nullptr) continue;
    comm::order(group->stream(), current_stream(), comm::EventSite::kReduced);
  }
  join_slots();  // kernels without a collective after them may still use the memory
  if (slots_.defined() && groups_.reduce != nullptr) pool_->recycle(std::move(slots_));
  slots_ = at::Tensor();
  finish_reduce();
  std::fill(arrived_.begin(), arrived_.end(), std::uint8_t{0});
  shared_slots_.clear();
  has_sum_ = false;
}

comm::Pending submit(comm::IssueQueue& queue, comm::Group& group, comm::Batch batch,
                     std::function<void()> fill) {
  if (group.stream()) return queue.submit(group, std::move(batch), std::move(fill));
  fill();
  return queue.submit(group, std::move(batch));
}

Groups::Groups(Mesh mesh) : mesh_(std::move(mesh)) {
  const auto& shapes = mesh_.shapes();
  const int rank = world().rank();
  const auto of_several = [&](const std::vector<int>& members, const char* purpose) {
    return members.size() > 1 ? world().group(members, purpose) : std::shared_ptr<comm::Group>();
  };
  replicas_ = of_several(shapes.dense().group_of(rank, {axis::kReplicate}), "replicas");
  const auto replica = shapes.replica_of(rank);
  replica_gathers_ = of_several(replica, "gather");
  replica_control_ = of_several(replica, "shard control");
  data_ = of_several(shapes.stage_of(rank), "data");
  stages_ = of_several(mesh_.ranks_of({axis::kPipeline}), "stages");
}

AxesGroups Groups::of(const layout::BucketKey& key) {
  const auto& axes = key.reductions.shard_axes;
  const auto& copies = key.reductions.copies;
  for (const auto& one : known_) {
    if (one.shard_axes == axes && one.copies == copies) return one.groups;
  }
  AxesGroups made;
  made.groups.replicas = replicas();
  if (!copies.empty()) {
    auto all = mesh_.ranks_of({axis::kPipeline, axis::kReplicate});
    std::erase_if(all, [&](int rank) {
      const int stage = mesh_.shapes().coordinate(rank, axis::kPipeline);
      return std::ranges::find(copies, stage) == copies.end();
    });
    // Ranks ascend: the first stage's replicas come first. The World keeps the group.
    made.groups.replicas = all.size() > 1 ? world().group(all, "copies").get() : nullptr;
  }
  const auto members = mesh_.ranks_of({axes.begin(), axes.end()});
  if (members.size() > 1) {
    // Separate groups, so that a long reduction does not delay the next gather. The World keeps
    // them.
    made.groups.gather = world().group(members, "gather").get();
    made.groups.reduce = world().group(members, "reduce").get();
    made.control = world().group(members, "shard control").get();
    made.rank = made.groups.gather->rank();
    made.ranks = made.groups.gather->size();
  }
  known_.push_back({axes, copies, made});
  return made;
}

}  // namespace tessera::fsdp
