// The controls of users, as a value: two models issue the same collectives only where it is equal,
// and messages name each difference from the agreed plan.
#include "fsdp/agreed/controls.h"

#include "support/test.h"

namespace tessera::fsdp::controls_test {
namespace {

Controls of_two_units() {
  Controls controls;
  controls.units.push_back({"a", {}, {}, {}});
  controls.units.push_back({"b", {}, {}, {}});
  return controls;
}

struct Change {
  std::function<void(Controls&)> make;
  std::string words;
};

const std::vector<Change>& changes() {
  static const std::vector<Change> all{
      {[](Controls& c) { c.model.requires_replica_reduce = false; },
       "set_requires_replica_reduce(false)"},
      {[](Controls& c) { c.model.is_last_backward = false; }, "set_is_last_backward(false)"},
      {[](Controls& c) { c.model.defers_weight_gradients = true; },
       "set_defer_weight_gradients(true)"},
      {[](Controls& c) { c.model.loss_scale = 1024; }, "a loss scale of 2^10"},
      {[](Controls& c) { c.units[1].controls.requires_sync = false; },
       "set_requires_gradient_sync(false) of b"},
      {[](Controls& c) { c.units[0].controls.reshard_after_forward = false; },
       "set_reshard_after_forward(false) of a"},
      {[](Controls& c) { c.units[0].controls.agreed_reshard_after_forward = false; },
       "set_reshard_after_forward(true) of a"},
      {[](Controls& c) { c.units[1].controls.reshard_after_backward = false; },
       "set_reshard_after_backward(false) of b"},
      {[](Controls& c) { c.units[1].controls.unshard_in_backward = false; },
       "set_unshard_in_backward(false) of b"},
      {[](Controls& c) { c.units[0].controls.divide_factor = 4; },
       "set_gradient_divide_factor(4) of a"},
      {[](Controls& c) { c.units[0].forward_prefetch = {"b", "(gone)"}; },
       "set_forward_prefetch of a to {b, (gone)}"},
      {[](Controls& c) { c.units[1].backward_prefetch = {"a"}; },
       "set_backward_prefetch of b to {a}"},
  };
  return all;
}

TEST(Controls, AsAgreedSayNothing) { EXPECT_EQ(to_string(of_two_units()), ""); }

TEST(Controls, EachChangeMakesAnotherValueAndIsNamed) {
  for (const auto& change : changes()) {
    Controls controls = of_two_units();
    change.make(controls);
    EXPECT_FALSE(controls == of_two_units()) << change.words;
    EXPECT_EQ(to_string(controls), change.words);
  }
}

TEST(Controls, OfAllUnitsAreSaidOnceAndSeveralInOneLine) {
  Controls controls = of_two_units();
  for (auto& unit : controls.units) unit.controls.requires_sync = false;
  controls.model.is_last_backward = false;
  EXPECT_EQ(to_string(controls), "set_requires_gradient_sync(false); set_is_last_backward(false)");
}

}  // namespace
}  // namespace tessera::fsdp::controls_test
