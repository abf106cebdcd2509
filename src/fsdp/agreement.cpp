#include "fsdp/agreement.h"

#include <algorithm>
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

std::optional<BackwardView> decode_backward_view(const std::string& bytes) {
  BackwardView view;
  std::istringstream in(bytes);
  std::size_t count = 0;
  in >> view.steps_done >> count;
  for (std::uint32_t number = 0; count > 0 && in >> number; --count) view.alive.insert(number);
  in >> count;
  std::uint32_t number = 0;
  std::string positions;
  for (; count > 0 && in >> number >> positions; --count) {
    auto& reached = view.reached[number];
    for (const char position : positions.substr(1)) reached.push_back(position == '1');
  }
  // Whatever was left out, or written in another way, reads differently.
  if (!in || encode(view) != bytes) return std::nullopt;
  return view;
}

BackwardView unite(const std::vector<BackwardView>& views) {
  BackwardView all;
  for (const auto& view : views) {
    all.steps_done = std::max(all.steps_done, view.steps_done);
    all.alive.insert(view.alive.begin(), view.alive.end());
    for (const auto& [number, positions] : view.reached) {
      auto& reached = all.reached[number];
      reached.resize(std::max(reached.size(), positions.size()));
      for (std::size_t i = 0; i < positions.size(); ++i) reached[i] = reached[i] || positions[i];
    }
  }
  return all;
}

}  // namespace tessera::fsdp
