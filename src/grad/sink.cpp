#include "grad/sink.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <utility>

#include "base/test_hooks.h"
#include "grad/region.h"
#include "grad/torch_dtype.h"
#include "kernels/kernels.h"
#include "kernels/operations.h"
#include "tessera/error.h"

namespace tessera::grad {

std::string_view to_string(Source source) {
  switch (source) {
    case Source::kEager:
      return "eager autograd";
    case Source::kDeferred:
      return "a deferred weight gradient";
    case Source::kCaptured:
      return "a captured backward";
  }
  return "unknown";
}

GradSink::Entry GradSink::entry_of(const GradContract* contract, SlotOwner* owner,
                                   std::size_t parameter) {
  Entry entry{contract, owner, parameter, {}};
  if (contract != nullptr && !contract->layout.axes.empty()) {
    entry.local_shape = contract->local_shape();
  }
  return entry;
}

SlotId GradSink::add(const GradContract* contract, SlotOwner* owner, std::size_t parameter) {
  slots_.push_back(entry_of(contract, owner, parameter));
  return static_cast<SlotId>(slots_.size() - 1);
}

void GradSink::update(SlotId slot, const GradContract* contract, SlotOwner* owner,
                      std::size_t parameter) {
  slots_.at(slot) = entry_of(contract, owner, parameter);
}

void GradSink::remove(SlotId id) {
  slots_.at(id) = {};
  std::erase_if(open_, [&](const auto& promise) {
    if (promise->slot != id) return false;
    promise->state = Ticket::State::kDropped;
    return true;
  });
}

namespace {

std::string gradient_from(const GradContract& contract, Source source) {
  return concat("gradient of ", contract.name, " from ", to_string(source));
}

}  // namespace

const std::vector<std::int64_t>& GradSink::shape_of(const Entry& entry) {
  return entry.local_shape.empty() ? entry.contract->shape : entry.local_shape;
}

void GradSink::check_dtype(const Entry& entry, at::ScalarType dtype, Source source) {
  TESSERA_CHECK(c10::isFloatingType(dtype), ErrorKind::kContract,
                gradient_from(*entry.contract, source), ": found dtype ", c10::toString(dtype),
                ", expected a real floating one");
}

void GradSink::check_shape(const Entry& entry, at::IntArrayRef found, at::IntArrayRef expected,
                           Source source) {
  TESSERA_CHECK(found == expected, ErrorKind::kContract, gradient_from(*entry.contract, source),
                ": found shape ", found, ", expected ", expected);
}

void GradSink::check_trainable(const Entry& entry, Source source) {
  const auto& contract = *entry.contract;
  TESSERA_CHECK(contract.trainable, ErrorKind::kContract, gradient_from(contract, source),
                ": found one, expected none since the parameter is frozen (",
                contract.reasons[static_cast<std::size_t>(ContractField::kTrainable)],
                "); set requires_grad before sharding");
}

void GradSink::check(const Entry& entry, const at::Tensor& raw, std::int64_t rows, Source source) {
  const auto& contract = *entry.contract;
  TESSERA_CHECK(raw.layout() == c10::kStrided, ErrorKind::kContract,
                gradient_from(contract, source), ": found layout ", raw.layout(),
                ", expected a dense one; use dense embeddings");
  check_dtype(entry, raw.scalar_type(), source);
  const auto& whole = shape_of(entry);
  std::vector<std::int64_t> some;
  if (rows >= 0 && !whole.empty()) {
    some = whole;
    some[0] = rows;
  }
  check_shape(entry, raw.sizes(), some.empty() ? whole : some, source);
  TESSERA_CHECK(
      !raw.requires_grad(), ErrorKind::kContract, gradient_from(contract, source),
      ": found a gradient that itself requires grad, expected a value; create_graph is not "
      "supported through a sharded module");
  check_trainable(entry, source);
}

namespace {

/// Returns the keys to exclude in a recording, of which the sink's operations are not a part.
c10::DispatchKeySet what_watches() {
  return recording() == nullptr ? c10::DispatchKeySet() : c10::DispatchKeySet(kernels::kWatchKey);
}

at::Tensor as_asked(const at::Tensor& raw, const GradContract& contract) {
  return contract.grad ? raw.to(to_scalar_type(*contract.grad)) : raw;
}

}  // namespace

void GradSink::accept(SlotId id, const at::Tensor& raw, Source source) {
  if (!raw.defined()) return;
  const auto& entry = slots_.at(id);
  check(entry, raw, -1, source);
  if (auto* here = recording()) here->gradient(*this, id, raw);
  const c10::impl::ExcludeDispatchKeyGuard unseen(what_watches());
  const at::NoGradGuard no_grad;
  const at::Tensor value = as_asked(raw, *entry.contract);
  const auto view = entry.owner->open_slot(entry.parameter);
  const auto target = view.slot.view(raw.sizes());
  if (view.first) {
    target.copy_(value);
  } else {
    kernels::add_into(target, value);
  }
  if (const auto hook = test_hooks::after_accept.get()) (*hook)(*entry.contract, target);
}

void GradSink::accept_rows(SlotId id, const at::Tensor& rows, const at::Tensor& raw,
                           Source source) {
  const auto& entry = slots_.at(id);
  TESSERA_INVARIANT(rows.dim() == 1 && rows.scalar_type() == at::kLong,
                    "rows of a gradient: found ", rows.scalar_type(), " ", rows.sizes());
  check(entry, raw, rows.size(0), source);
  refuse_recording("a gradient of some rows, whose number follows from data");
  const c10::impl::ExcludeDispatchKeyGuard unseen(what_watches());
  const at::NoGradGuard no_grad;
  const auto view = entry.owner->open_slot(entry.parameter);
  const auto target = view.slot.view(shape_of(entry));
  if (view.first) target.zero_();
  const at::Tensor sums = target.index_select(0, rows);
  kernels::add_into(sums, as_asked(raw, *entry.contract));
  target.index_copy_(0, rows, sums);
  if (const auto hook = test_hooks::after_accept.get()) (*hook)(*entry.contract, target);
}

std::optional<SharedSlot> GradSink::share(SlotId id, const RawLike& raw, Source source) {
  const auto& entry = slots_.at(id);
  const auto& contract = *entry.contract;
  check_dtype(entry, raw.dtype, source);
  check_shape(entry, raw.sizes, shape_of(entry), source);
  check_trainable(entry, source);
  if (recording() != nullptr) return std::nullopt;  // the write would be recorded
  if (contract.grad || raw.dtype != to_scalar_type(contract.accumulate)) return std::nullopt;
  const at::NoGradGuard no_grad;
  const at::Tensor slot = entry.owner->share_slot(entry.parameter);
  if (!slot.defined()) return std::nullopt;
  SharedSlot shared(this, id, slot.view(raw.sizes));
  // accept() would copy the gradient from any device.
  if (slot.device() != raw.device) return std::nullopt;
  return shared;
}

bool GradSink::write(SlotId id, const Product& product, Source source) {
  if (!product.write) return false;
  TESSERA_INVARIANT(!product.reads.empty(), "a product of nothing");
  auto shared = share(id, {product.sizes, product.dtype, product.reads.front().device()}, source);
  if (!shared) return false;
  // A kernel must not write to memory that it reads.
  for (const at::Tensor& read : product.reads) {
    if (read.defined() && read.is_alias_of(shared->tensor())) return false;
  }
  product.write(product.reads, shared->tensor());
  shared->mark_arrived();
  return true;
}

void GradSink::end_share(SlotId id, const at::Tensor& written, bool arrived) {
  const auto& entry = slots_.at(id);
  entry.owner->end_share(entry.parameter, arrived);
  if (!arrived) return;
  if (const auto hook = test_hooks::after_accept.get()) (*hook)(*entry.contract, written);
}

SharedSlot::~SharedSlot() {
  if (sink_ == nullptr) return;
  try {
    sink_->end_share(id_, tensor_, /*arrived=*/false);
  } catch (const std::exception&) {
    // Destructors must not throw. The share of a removed slot has ended with it.
  }
}

void SharedSlot::mark_arrived() {
  TESSERA_INVARIANT(sink_ != nullptr, "a shared slot was marked as arrived twice");
  std::exchange(sink_, nullptr)->end_share(id_, tensor_, /*arrived=*/true);
}

std::string Ticket::Promise::text() const {
  const auto stage = group.stage < 0 ? std::string() : concat(", stage ", group.stage);
  return concat(parameter, " (layer ", layer, stage, ", micro-batch ", group.micro_batch, ")");
}

Ticket GradSink::promise(SlotId id, std::string layer, WeightGradGroup group) {
  const auto& entry = slots_.at(id);
  Ticket ticket;
  ticket.promise_ = std::make_shared<Ticket::Promise>(
      Ticket::Promise{this, id, entry.contract->name, std::move(layer), group});
  open_.push_back(ticket.promise_);
  entry.owner->tickets_changed(+1);
  return ticket;
}

const Ticket::Promise& GradSink::open_promise(const Ticket& ticket) const {
  const auto& promise = ticket.promise_;
  TESSERA_CHECK(promise != nullptr, ErrorKind::kContract,
                "deferred gradient: found an empty ticket, expected one of promise()");
  TESSERA_CHECK(promise->state != Ticket::State::kRedeemed, ErrorKind::kContract,
                "deferred gradient of ", promise->text(),
                ": found its ticket redeemed twice, expected once");
  TESSERA_CHECK(
      promise->state != Ticket::State::kDropped, ErrorKind::kContract, "deferred gradient of ",
      promise->text(),
      ": found a ticket of a step that failed, or of a module that is gone, expected one of this "
      "step; drop the tickets of failed steps, and keep the handles");
  TESSERA_CHECK(promise->sink == this, ErrorKind::kContract, "deferred gradient of ",
                promise->text(),
                ": found a ticket of another model, expected one of this sink's promise()");
  return *promise;
}

void GradSink::close(const Ticket& ticket) {
  const auto& promise = ticket.promise_;
  promise->state = Ticket::State::kRedeemed;
  std::erase(open_, promise);
  slots_.at(promise->slot).owner->tickets_changed(-1);
}

void GradSink::redeem(const Ticket& ticket, const at::Tensor& raw) {
  accept(open_promise(ticket).slot, raw, Source::kDeferred);
  close(ticket);
}

void GradSink::redeem(const Ticket& ticket, const Product& product) {
  const SlotId id = open_promise(ticket).slot;
  if (!write(id, product, Source::kDeferred)) accept(id, product.formed(), Source::kDeferred);
  close(ticket);
}

void GradSink::require_all_redeemed(const char* before) const {
  if (open_.empty()) return;
  require_redeemed(before, [](const SlotOwner&, WeightGradGroup) { return true; });
}

void GradSink::require_redeemed(
    const char* before,
    const std::function<bool(const SlotOwner&, WeightGradGroup)>& is_meant) const {
  std::string open;
  std::size_t count = 0;
  for (const auto& promise : open_) {
    if (!is_meant(*slots_.at(promise->slot).owner, promise->group)) continue;
    ++count;
    open += concat(open.empty() ? "" : "; ", promise->text());
  }
  TESSERA_CHECK(count == 0, ErrorKind::kContract, before, ": found ", count,
                " deferred gradients that are not redeemed, expected none: ", open,
                "; run the deferred weight gradients first");
}

void GradSink::drop_tickets() {
  for (const auto& promise : open_) promise->state = Ticket::State::kDropped;
  open_.clear();
}

void WeightGradStore::put(SlotId slot, Product product, const comm::Stream& made_on) {
  if (auto* here = recording()) here->deferred(sink_, slot, product);
  const std::string& parameter = sink_.contract(slot).name;
  std::string layer = parameter.substr(0, parameter.rfind('.'));
  pending_.push_back(
      {group_, sink_.promise(slot, std::move(layer), group_), std::move(product), made_on});
}

void WeightGradStore::form(std::size_t place) {
  const auto at = pending_.begin() + static_cast<std::ptrdiff_t>(place);
  // Its inputs are freed before the next product is formed.
  const PendingGrad pending = std::move(*at);
  pending_.erase(at);
  if (const auto* hook = test_hooks::hands_in.get()) {
    return (*hook)(sink_.contract(pending.ticket.slot()).name,
                   [this, pending] { hand_in(pending); });
  }
  hand_in(pending);
}

void WeightGradStore::hand_in(const PendingGrad& pending) {
  const auto here =
      pending.made_on ? comm::Stream::current(pending.made_on.device()) : comm::Stream();
  comm::order(pending.made_on, here, comm::EventSite::kDeferred);
  sink_.redeem(pending.ticket, pending.product);
  // The inputs are freed on that stream.
  comm::order(here, pending.made_on, comm::EventSite::kDeferred);
}

void WeightGradStore::form_all() {
  if (pending_.empty()) return;
  const at::NoGradGuard no_grad;
  while (!pending_.empty()) form(0);
}

void WeightGradStore::run() {
  form_all();
  counted_ = 0;
}

void WeightGradStore::run(WeightGradGroup group) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < pending_.size();) {
    pending_[i].group == group ? form(i) : static_cast<void>(++i);
  }
}

void WeightGradStore::drop() {
  pending_.clear();
  counted_ = 0;
}

}  // namespace tessera::grad
