#include "fsdp/agreement.h"

#include <sstream>

namespace tessera::fsdp {

std::string encode(const BackwardView& view) {
  std::ostringstream out;
  out << view.steps_done << ' ' << view.alive.size();
  for (const auto number : view.alive) out << ' ' << number;
  out << ' ' << view.reached.size();
  for (const auto& [number, positions] : view.reached) {
    out << ' ' << number << " p";
    for (const bool position : positions) out << (position ? '1' : '0');
  }
  out << '\n';
  return out.str();
}

std::vector<bool> to_bits(const BackwardView& view, const KnownToAll& known) {
  std::vector<bool> bits;
  for (std::uint64_t step = 0; step < known.steps; ++step) bits.push_back(step < view.steps_done);
  for (const auto& [number, positions] : known.forwards) {
    const auto found = view.reached.find(number);
    const bool reaches = found != view.reached.end();
    bits.push_back(view.alive.count(number) != 0);
    bits.push_back(reaches);
    for (std::size_t i = 0; i < positions; ++i) bits.push_back(reaches && found->second.at(i));
  }
  return bits;
}

BackwardView from_bits(const std::vector<bool>& bits, const KnownToAll& known) {
  BackwardView view;
  auto next = bits.begin();
  for (std::uint64_t step = 0; step < known.steps; ++step) view.steps_done += *next++ ? 1 : 0;
  for (const auto& [number, positions] : known.forwards) {
    if (*next++) view.alive.insert(number);
    const bool reaches = *next++;
    const auto end = next + static_cast<std::ptrdiff_t>(positions);
    if (reaches) view.reached.emplace(number, std::vector<bool>(next, end));
    next = end;
  }
  return view;
}

}  // namespace tessera::fsdp
