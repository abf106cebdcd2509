#include "fsdp/agreed/backward_view.h"

#include "tessera/error.h"

namespace tessera::fsdp {

std::vector<bool> to_bits(const BackwardView& view, const ViewFrame& frame) {
  TESSERA_INVARIANT(view.actions_done <= frame.actions, view.actions_done, " of ", frame.actions,
                    " actions");
  // As many ones as actions: the most of any rank stay.
  std::vector<bool> bits(frame.actions, false);
  for (std::size_t i = 0; i < view.actions_done; ++i) bits[i] = true;
  for (const auto& [number, units] : frame.forwards) {
    const auto reached = view.reached.find(number);
    const bool goes_through = reached != view.reached.end();
    bits.push_back(view.alive.contains(number));
    bits.push_back(goes_through);
    for (std::size_t i = 0; i < units; ++i) {
      bits.push_back(goes_through && reached->second.at(i));
    }
  }
  return bits;
}

BackwardView from_bits(const std::vector<bool>& bits, const ViewFrame& frame) {
  BackwardView view;
  auto bit = bits.begin();
  for (std::size_t i = 0; i < frame.actions; ++i) view.actions_done += *bit++ ? 1U : 0U;
  for (const auto& [number, units] : frame.forwards) {
    if (*bit++) view.alive.insert(number);
    const bool goes_through = *bit++;
    const auto end = bit + static_cast<std::ptrdiff_t>(units);
    if (goes_through) view.reached.emplace(number, std::vector<bool>(bit, end));
    bit = end;
  }
  return view;
}

}  // namespace tessera::fsdp
