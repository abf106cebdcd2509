#include "fsdp/agreement.h"

#include "tessera/error.h"

namespace tessera::fsdp {

std::vector<bool> to_bits(const BackwardView& view, const ViewFrame& frame) {
  TESSERA_INVARIANT(view.steps_done <= frame.steps, view.steps_done, " of ", frame.steps, " steps");
  std::vector<bool> bits(frame.steps, false);  // as many ones as steps: the most of any rank stay
  for (std::size_t i = 0; i < view.steps_done; ++i) bits[i] = true;
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
  for (std::size_t i = 0; i < frame.steps; ++i) view.steps_done += *bit++ ? 1U : 0U;
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
