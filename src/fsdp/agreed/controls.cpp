#include "fsdp/agreed/controls.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

class Words {
 public:
  void add(const std::string& what) { text_ += concat(text_.empty() ? "" : "; ", what); }
  /// Adds "what of a, b" for the units where it is set, or "what" alone where it is set for all.
  void add(const std::string& what, const std::vector<Controls::OfUnit>& all,
           const std::function<bool(const UnitControls&)>& is_set) {
    std::vector<std::string> names;
    for (const auto& unit : all) {
      if (is_set(unit.controls)) names.push_back(unit.name);
    }
    if (names.empty()) return;
    add(names.size() == all.size() ? what : concat(what, " of ", joined(names)));
  }
  void add_prefetch(const char* what, const std::string& unit,
                    const std::vector<std::string>& named) {
    if (!named.empty()) add(concat(what, " of ", unit, " to {", joined(named), "}"));
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

}  // namespace

std::string to_string(const Controls& controls) {
  Words words;
  const auto& [model, units] = controls;
  const auto add = [&](const char* what, bool UnitControls::* is_off) {
    words.add(what, units, [&](const UnitControls& unit) { return !(unit.*is_off); });
  };
  add("set_requires_gradient_sync(false)", &UnitControls::requires_sync);
  if (!model.requires_replica_reduce) words.add("set_requires_replica_reduce(false)");
  if (!model.is_last_backward) words.add("set_is_last_backward(false)");
  if (model.defers_weight_gradients) words.add("set_defer_weight_gradients(true)");
  if (model.loss_scale != 1.0) {
    words.add(concat("a loss scale of 2^", std::ilogb(model.loss_scale)));
  }
  words.add("set_reshard_after_forward(true)", units, [](const UnitControls& unit) {
    return unit.reshard_after_forward && !unit.agreed_reshard_after_forward;
  });
  words.add("set_reshard_after_forward(false)", units, [](const UnitControls& unit) {
    return !unit.reshard_after_forward && unit.agreed_reshard_after_forward;
  });
  add("set_reshard_after_backward(false)", &UnitControls::reshard_after_backward);
  add("set_unshard_in_backward(false)", &UnitControls::unshard_in_backward);
  for (const auto& unit : units) {
    if (unit.controls.divide_factor) {
      words.add(
          concat("set_gradient_divide_factor(", *unit.controls.divide_factor, ") of ", unit.name));
    }
    words.add_prefetch("set_forward_prefetch", unit.name, unit.forward_prefetch);
    words.add_prefetch("set_backward_prefetch", unit.name, unit.backward_prefetch);
  }
  return words.take();
}

}  // namespace tessera::fsdp
