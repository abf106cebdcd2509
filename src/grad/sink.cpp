#include "grad/sink.h"

#include <ATen/ATen.h>

#include "grad/torch_dtype.h"
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

SlotId GradSink::add(const GradContract* contract, SlotOwner* owner, std::size_t parameter) {
  slots_.push_back({contract, owner, parameter});
  return static_cast<SlotId>(slots_.size() - 1);
}

void GradSink::update(SlotId slot, const GradContract* contract, SlotOwner* owner,
                      std::size_t parameter) {
  slots_.at(slot) = {contract, owner, parameter};
}

void GradSink::check(const Slot& slot, const at::Tensor& raw, Source source) const {
  const auto& contract = *slot.contract;
  const auto from = [&] {
    return concat("gradient of ", contract.name, " from ", to_string(source));
  };
  TESSERA_CHECK(raw.layout() == c10::kStrided, ErrorKind::kContract, from(), ": found layout ",
                raw.layout(), ", expected a dense one; use dense embeddings");
  TESSERA_CHECK(c10::isFloatingType(raw.scalar_type()), ErrorKind::kContract, from(),
                ": found dtype ", c10::toString(raw.scalar_type()),
                ", expected a real floating one");
  TESSERA_CHECK(raw.sizes() == c10::IntArrayRef(contract.shape), ErrorKind::kContract, from(),
                ": found shape ", raw.sizes(), ", expected ", c10::IntArrayRef(contract.shape));
  TESSERA_CHECK(
      !raw.requires_grad(), ErrorKind::kContract, from(),
      ": found a gradient that itself requires grad, expected a value; create_graph is not "
      "supported through a sharded module");
  TESSERA_CHECK(contract.trainable, ErrorKind::kContract, from(),
                ": found one, expected none since the parameter is frozen (",
                contract.reasons[static_cast<std::size_t>(ContractField::kTrainable)],
                "); set requires_grad before sharding");
}

void GradSink::accept(SlotId id, const at::Tensor& raw, Source source) {
  if (!raw.defined()) return;
  const auto& slot = slots_.at(id);
  check(slot, raw, source);
  const at::NoGradGuard no_grad;
  auto value = raw;
  if (slot.contract->grad) value = raw.to(to_scalar_type(*slot.contract->grad));
  const auto view = slot.owner->open_slot(slot.parameter);
  const auto target = view.slot.view(raw.sizes());
  if (view.first) {
    target.copy_(value);
  } else {
    target.add_(value);
  }
}

Ticket GradSink::promise(SlotId slot, std::string layer, std::int64_t micro_batch) {
  if (open_ == 0) promises_.clear();  // a long run keeps no book of what is settled
  const auto ticket = next_ticket_++;
  promises_.emplace(ticket, Promise{slot, std::move(layer), micro_batch, false});
  ++open_;
  slots_.at(slot).owner->tickets_changed(+1);
  return ticket;
}

void GradSink::redeem(Ticket ticket, const at::Tensor& raw) {
  const auto found = promises_.find(ticket);
  TESSERA_CHECK(found != promises_.end(), ErrorKind::kContract, "ticket ", ticket,
                ": found no promise of that number, expected one of promise()");
  auto& promise = found->second;
  TESSERA_CHECK(!promise.redeemed, ErrorKind::kContract, "deferred gradient of ",
                contract(promise.slot).name, " (layer ", promise.layer, ", micro-batch ",
                promise.micro_batch, "): redeemed twice, expected once");
  accept(promise.slot, raw, Source::kDeferred);
  promise.redeemed = true;
  --open_;
  slots_.at(promise.slot).owner->tickets_changed(-1);
}

void GradSink::require_all_redeemed() const {
  if (open_ == 0) return;
  std::string open;
  for (const auto& [ticket, promise] : promises_) {
    if (promise.redeemed) continue;
    open += concat(open.empty() ? "" : "; ", slots_.at(promise.slot).contract->name, " (layer ",
                   promise.layer, ", micro-batch ", promise.micro_batch, ")");
  }
  TESSERA_CHECK(false, ErrorKind::kContract, "deferred gradients: found ", open_,
                " not redeemed at the end of the step, expected none: ", open,
                "; run the deferred weight gradients before the step ends");
}

void GradSink::drop_tickets() {
  for (const auto& [ticket, promise] : promises_) {
    if (!promise.redeemed) slots_.at(promise.slot).owner->tickets_changed(-1);
  }
  promises_.clear();
  open_ = 0;
}

}  // namespace tessera::grad
