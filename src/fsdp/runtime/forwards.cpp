#include "fsdp/runtime/forwards.h"

#include <algorithm>
#include <utility>

#include "fsdp/runtime/unit.h"

namespace tessera::fsdp {

std::uint64_t weights_of(const std::vector<std::shared_ptr<Unit>>& units) {
  std::uint64_t version = 0;
  for (const auto& unit : units) version += unit->weights_version();
  return version;
}

std::uint64_t Segment::weights_now() const { return weights_of(*units); }

void Forwards::begin(HeldUnits units, std::uint64_t weights) {
  current_ = std::make_shared<Segment>();
  current_->forward = std::make_shared<PastForward>();
  current_->forward->number = count_++;
  current_->units = std::move(units);
  current_->weights = weights;
  follows_ = !reference_.units.empty();
}

std::size_t Forwards::enter(UnitId unit, std::uint32_t checkpoint) {
  auto& trace = current_->forward->trace;
  const auto position = trace.units.size();
  open_.push_back(position);
  trace.units.push_back(unit);
  trace.checkpoints.push_back(checkpoint);
  follows_ = follows_ && position < reference_.units.size() && reference_.units[position] == unit;
  return position;
}

bool Forwards::leave() {
  current_->forward->trace.exits.push_back(open_.back());
  open_.pop_back();
  return open_.empty();
}

void Forwards::abandon() {
  open_.clear();
  current_.reset();
}

std::uint32_t Forwards::number_of_checkpoint(std::uint64_t serial) {
  if (std::exchange(checkpoint_serial_, serial) != serial) ++checkpoints_;
  return checkpoints_;
}

std::optional<UnitId> Forwards::next_after(std::size_t position) const {
  if (!follows_ || position + 1 >= reference_.units.size()) return std::nullopt;
  return reference_.units[position + 1];
}

bool Forwards::is_last(UnitId unit) const {
  const auto& units = current_->forward->trace.units;
  return follows_ && units.size() == reference_.units.size() && reference_.units.back() == unit &&
         units.back() == unit;
}

void Forwards::forget_all_but(const std::set<std::uint32_t>& alive) {
  std::erase_if(past_, [&](const Past& past) {
    return !alive.contains(past.forward->number) &&
           (current_ == nullptr || past.forward != current_->forward);
  });
}

void Forwards::forgot_what_it_could() { limit_ = std::max<std::size_t>(limit_, 2 * past_.size()); }

void Forwards::forget_steps() {
  std::erase_if(past_, [](const Past& past) { return past.forward->in_step.has_value(); });
}

void Forwards::forget_units() {
  reference_ = {};
  for (const auto& past : past_) past.forward->forgotten = true;
  past_.clear();
}

}  // namespace tessera::fsdp
