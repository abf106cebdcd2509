// GradSink: what it adds, what it refuses, and the book of deferred gradients.
#include "grad/sink.h"

#include <ATen/ATen.h>

#include <optional>

#include "base/test_hooks.h"
#include "support/test.h"

namespace tessera::grad::sink_test {
namespace {

/// Slots in memory of its own.
class Owner : public SlotOwner {
 public:
  Owner(std::int64_t numel, at::ScalarType dtype)
      : slot(at::full({numel}, 1e30, at::TensorOptions().dtype(dtype))) {}
  View open_slot(std::size_t parameter) override {
    opened.push_back(parameter);
    const bool first = std::exchange(empty, false);
    return {slot, first};
  }
  at::Tensor share_slot(std::size_t parameter) override {
    if (!can_share || !empty || std::exchange(is_shared, true)) return {};
    shared.push_back(parameter);
    return slot;
  }
  void end_share(std::size_t parameter, bool arrived) override {
    EXPECT_TRUE(std::exchange(is_shared, false));
    EXPECT_EQ(parameter, shared.back());
    if (arrived) empty = false;
    arrivals.push_back(arrived);
  }
  void tickets_changed(int delta) override { tickets += delta; }

  at::Tensor slot;
  bool empty = true;
  bool can_share = true;
  bool is_shared = false;
  std::vector<std::size_t> opened, shared;
  std::vector<bool> arrivals;  ///< by ended share of a slot
  int tickets = 0;
};

GradContract contract_of(std::vector<std::int64_t> shape, DType accumulate = DType::kFloat32) {
  GradContract contract;
  contract.name = "model.norm.weight";
  contract.shape = std::move(shape);
  contract.accumulate = accumulate;
  return contract;
}

std::string refusal(const std::function<void()>& run) {
  return refusal_of(ErrorKind::kContract, [&] { run(); });
}

class Sink : public ::testing::Test {
 protected:
  SlotId slot() { return sink.add(&contract, &owner, 5); }
  GradContract contract = contract_of({2, 2});
  Owner owner{4, at::kFloat};
  GradSink sink;
};

at::Tensor full(double value, at::ScalarType dtype) {
  return at::full({2, 2}, value, at::TensorOptions().dtype(dtype));
}

// Naive: sums in the raw dtype (256 + 1 - 256 = 0 in bf16), or a slot of the first raw dtype.
TEST_F(Sink, GradientsOfAnyDtypeAreAddedUnrounded) {
  const auto id = slot();
  sink.accept(id, full(256, at::kBFloat16), Source::kEager);
  sink.accept(id, full(1, at::kHalf), Source::kCaptured);
  sink.accept(id, full(-256, at::kBFloat16), Source::kEager);
  sink.accept(id, full(0.5, at::kDouble), Source::kDeferred);
  EXPECT_TRUE(at::equal(owner.slot, at::full({4}, 1.5F)));
  EXPECT_THAT(owner.opened, Each(5U));
}

TEST_F(Sink, TheFirstOverwritesWhatStoodThere) {
  sink.accept(slot(), full(3, at::kFloat), Source::kEager);
  EXPECT_TRUE(at::equal(owner.slot, at::full({4}, 3.0F)));
}

TEST_F(Sink, StridedAndExpandedGradientsLandInTheirPlaces) {
  const auto id = slot();
  sink.accept(id, at::arange(4, at::kFloat).reshape({2, 2}).t(), Source::kEager);
  EXPECT_TRUE(at::equal(owner.slot, at::tensor({0.0F, 2.0F, 1.0F, 3.0F})));
  sink.accept(id, at::ones({1, 1}).expand({2, 2}), Source::kEager);
  EXPECT_TRUE(at::equal(owner.slot, at::tensor({1.0F, 3.0F, 2.0F, 4.0F})));
}

// The result has the bits of accept() of the whole gradient, rounding on arrival included.
TEST_F(Sink, RowsAreAddedAsTheWholeGradientWouldBe) {
  at::manual_seed(3);
  contract.shape = {5, 3};
  const std::vector<at::Tensor> rows{at::tensor({4, 0}), at::tensor({3, 4, 1}),
                                     at::empty({0}, at::kLong), at::tensor({0, 1, 2, 3, 4})};
  for (const auto& grad : {std::optional<DType>(), std::optional(DType::kBFloat16)}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      for (const at::ScalarType accumulate : {at::kFloat, at::kDouble, at::kBFloat16}) {
        contract.grad = grad;
        Owner whole(15, accumulate), in_rows(15, accumulate);
        const auto whole_id = sink.add(&contract, &whole, 0);
        const auto rows_id = sink.add(&contract, &in_rows, 0);
        for (const at::Tensor& some : rows) {
          const at::Tensor raw = at::randn({some.numel(), 3}).to(dtype);
          sink.accept(whole_id, at::zeros({5, 3}, dtype).index_copy(0, some.to(at::kLong), raw),
                      Source::kEager);
          sink.accept_rows(rows_id, some.to(at::kLong), raw, Source::kEager);
          EXPECT_TRUE(at::equal(whole.slot, in_rows.slot)) << dtype << " in " << accumulate;
        }
        EXPECT_EQ(in_rows.opened.size(), rows.size());
      }
    }
  }
}

TEST_F(Sink, RowsThatBreakTheContractAreRefusedByName) {
  const auto id = slot();
  const auto refused = [&](const at::Tensor& rows, const at::Tensor& raw) {
    return refusal([&] { sink.accept_rows(id, rows, raw, Source::kEager); });
  };
  const at::Tensor one = at::ones({1}, at::kLong);
  EXPECT_THAT(refused(one, at::zeros({2, 2})), Says("model.norm.weight", "[2, 2]", "[1, 2]"));
  EXPECT_THAT(refused(one, at::zeros({1, 3})), Says("[1, 3]"));
  EXPECT_THAT(refused(one, at::zeros({1, 2}, at::kLong)), Says("real floating"));
  contract.trainable = false;
  EXPECT_THAT(refused(one, at::zeros({1, 2})), Says("frozen"));
  EXPECT_TRUE(owner.opened.empty());
}

TEST_F(Sink, AnUndefinedGradientIsNothing) {
  sink.accept(slot(), at::Tensor(), Source::kEager);
  EXPECT_TRUE(owner.opened.empty());
}

TEST_F(Sink, RoundsOnArrivalOnlyWhereTheContractAsks) {
  contract.grad = DType::kBFloat16;
  sink.accept(slot(), full(1.0 + 1.0 / 1024, at::kFloat), Source::kEager);
  EXPECT_TRUE(at::equal(owner.slot, at::ones({4})));
}

TEST_F(Sink, AScalarAndAnEmptyParameter) {
  contract.shape = {};
  Owner one(1, at::kFloat);
  sink.accept(sink.add(&contract, &one, 0), at::full({}, 2.0F), Source::kEager);
  EXPECT_EQ(one.slot.item<float>(), 2.0F);
  auto hollow = contract_of({0, 3});
  Owner none(0, at::kFloat);
  sink.accept(sink.add(&hollow, &none, 0), at::zeros({0, 3}), Source::kEager);
  EXPECT_EQ(none.opened.size(), 1U);
}

TEST_F(Sink, RefusesByNameWhatBreaksTheContract) {
  const auto id = slot();
  const auto refused = [&](const at::Tensor& raw) {
    return refusal([&] { sink.accept(id, raw, Source::kEager); });
  };
  EXPECT_THAT(refused(at::zeros({2, 2}).to_sparse()), Says("model.norm.weight", "layout"));
  EXPECT_THAT(refused(at::zeros({2, 2}, at::kComplexFloat)), Says("real floating"));
  EXPECT_THAT(refused(at::zeros({4})), Says("shape [4]", "[2, 2]"));
  EXPECT_THAT(refused(at::zeros({2, 2}).requires_grad_()), Says("create_graph"));
  contract.trainable = false;
  EXPECT_THAT(refused(at::zeros({2, 2})), Says("frozen"));
  EXPECT_TRUE(owner.opened.empty()) << "nothing was opened for what was refused";
}

TEST_F(Sink, ASlotThatMovesGoesToItsNewOwner) {
  const auto id = slot();
  Owner other(4, at::kDouble);
  auto moved = contract_of({2, 2}, DType::kFloat64);
  sink.update(id, &moved, &other, 7);
  sink.accept(id, full(2, at::kFloat), Source::kEager);
  EXPECT_TRUE(owner.opened.empty());
  EXPECT_THAT(other.opened, ElementsAre(7U));
  EXPECT_EQ(&sink.contract(id), &moved);
}

// ----------------------------------------------------------------------------------- direct slots

/// Returns the properties of a gradient of the fixture's parameter.
RawLike raw_of(at::ScalarType dtype, at::IntArrayRef sizes = {2, 2}) {
  return {sizes, dtype, at::kCPU};
}

/// `value` everywhere, formed or written; counts which of both it was.
struct Counted {
  int formed = 0;
  int written = 0;

  Product product(double value, at::ScalarType dtype = at::kFloat) {
    using Reads = Product::Reads;
    return {.sizes = {2, 2},
            .dtype = dtype,
            .reads = {full(value, dtype)},
            .form =
                [this](const Reads& of) {
                  ++formed;
                  return of[0].clone();
                },
            .write =
                [this](const Reads& of, const at::Tensor& slot) {
                  ++written;
                  slot.copy_(of[0]);
                }};
  }
};

TEST_F(Sink, AKernelWritesTheFirstGradientIntoItsSlot) {
  const auto id = slot();
  auto shared = sink.share(id, raw_of(at::kFloat), Source::kCaptured);
  ASSERT_TRUE(shared);
  EXPECT_EQ(shared->tensor().const_data_ptr(), owner.slot.const_data_ptr());
  EXPECT_EQ(shared->tensor().sizes(), at::IntArrayRef({2, 2}));
  EXPECT_TRUE(shared->tensor().is_contiguous());
  shared->tensor().fill_(256);
  EXPECT_TRUE(owner.empty) << "nothing has arrived before mark_arrived()";
  shared->mark_arrived();
  EXPECT_FALSE(sink.share(id, raw_of(at::kFloat), Source::kEager)) << "the second is an addition";
  sink.accept(id, full(1, at::kBFloat16), Source::kEager);
  sink.accept(id, full(-256, at::kHalf), Source::kEager);
  EXPECT_TRUE(at::equal(owner.slot, at::ones({4})));
  EXPECT_THAT(owner.shared, ElementsAre(5U));
}

TEST_F(Sink, SharesNothingWhereMoreThanTheProductIsToBeDone) {
  const auto id = slot();
  const auto is_shared = [&](at::ScalarType dtype) {
    return sink.share(id, raw_of(dtype), Source::kEager).has_value();
  };
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
    EXPECT_FALSE(is_shared(dtype)) << "a cast of " << dtype;
  }
  contract.grad = DType::kFloat32;
  EXPECT_FALSE(is_shared(at::kFloat)) << "a rounding is asked for";
  contract.grad = {};
  EXPECT_TRUE(owner.shared.empty()) << "the owner was not asked";
  owner.can_share = false;
  EXPECT_FALSE(is_shared(at::kFloat)) << "the owner shares none";
  owner.can_share = true;
  EXPECT_FALSE(sink.share(id, {contract.shape, at::kFloat, at::Device(at::kMeta)}, Source::kEager))
      << "a copy from another device";
  EXPECT_THAT(owner.arrivals, ElementsAre(false));
  const at::Tensor row = at::zeros({1}, at::kLong);
  sink.accept_rows(id, row, at::ones({1, 2}), Source::kEager);
  EXPECT_FALSE(is_shared(at::kFloat)) << "rows have arrived";
}

TEST_F(Sink, RefusesByNameToLendWhatBreaksTheContract) {
  const auto id = slot();
  const auto refused = [&](const RawLike& raw) {
    return refusal([&] { sink.share(id, raw, Source::kCaptured); });
  };
  EXPECT_THAT(refused(raw_of(at::kFloat, {4})),
              Says("model.norm.weight from a captured backward", "[4]", "[2, 2]"));
  EXPECT_THAT(refused(raw_of(at::kLong)), Says("real floating"));
  contract.trainable = false;
  EXPECT_THAT(refused(raw_of(at::kFloat)), Says("frozen"));
  EXPECT_TRUE(owner.shared.empty());
}

// Naive: a slot that counts as full from the moment it is shared.
TEST_F(Sink, AKernelThatThrowsLeavesItsSlotAsNotArrived) {
  const auto id = slot();
  Counted counted;
  auto product = counted.product(3);
  product.write = [](const Product::Reads&, const at::Tensor& slot) {
    slot.narrow(0, 0, 1).fill_(7);
    throw Error(ErrorKind::kContract, "half of it");
  };
  EXPECT_EQ(refusal([&] { sink.write(id, product, Source::kEager); }), "half of it");
  EXPECT_THAT(owner.arrivals, ElementsAre(false));
  EXPECT_TRUE(owner.empty);
  EXPECT_TRUE(sink.write(id, counted.product(3), Source::kEager));
  EXPECT_TRUE(at::equal(owner.slot, at::full({4}, 3.0F)));
  EXPECT_EQ(counted.formed, 0);
}

TEST_F(Sink, ASharedSlotIsMarkedAsArrivedOnce) {
  auto shared = sink.share(slot(), raw_of(at::kFloat), Source::kEager);
  ASSERT_TRUE(shared);
  SharedSlot moved = std::move(*shared);
  shared.reset();
  EXPECT_TRUE(owner.is_shared) << "the object that it was moved to has it";
  moved.mark_arrived();
  EXPECT_REFUSED(kInternal, moved.mark_arrived());
  EXPECT_THAT(owner.arrivals, ElementsAre(true));
}

TEST_F(Sink, ASlotIsSharedWithOneAtATime) {
  const auto id = slot();
  auto first = sink.share(id, raw_of(at::kFloat), Source::kEager);
  ASSERT_TRUE(first);
  EXPECT_FALSE(sink.share(id, raw_of(at::kFloat), Source::kDeferred));
  first.reset();
  EXPECT_TRUE(sink.share(id, raw_of(at::kFloat), Source::kDeferred))
      << "nothing came of the first one";
}

// Naive: the first product is written over what it reads.
TEST_F(Sink, AProductThatReadsTheSlotIsFormedInOtherMemory) {
  const auto id = slot();
  Counted counted;
  auto product = counted.product(2);
  product.reads.push_back(owner.slot.narrow(0, 1, 2));
  EXPECT_FALSE(sink.write(id, product, Source::kEager));
  EXPECT_EQ(counted.written, 0);
  EXPECT_TRUE(owner.empty);
  product.reads.pop_back();
  EXPECT_TRUE(sink.write(id, product, Source::kEager));
}

TEST_F(Sink, AProductWithoutAWayIntoTheSlotIsLeftToItsMaker) {
  Counted counted;
  auto product = counted.product(2);
  product.write = nullptr;
  EXPECT_FALSE(sink.write(slot(), product, Source::kEager));
  EXPECT_EQ(counted.formed, 0);
  EXPECT_TRUE(owner.shared.empty());
}

TEST_F(Sink, ThePlaceOfTestsSeesWhatAKernelHasWritten) {
  const test_hooks::Set fault(test_hooks::after_accept,
                              [](const GradContract& of, const at::Tensor& slot) {
                                EXPECT_EQ(of.name, "model.norm.weight");
                                slot.mul_(2);
                              });
  Counted counted;
  EXPECT_TRUE(sink.write(slot(), counted.product(3), Source::kEager));
  EXPECT_TRUE(at::equal(owner.slot, at::full({4}, 6.0F)));
}

TEST_F(Sink, ADeferredProductIsWrittenByTheFirstThatIsRedeemed) {
  const auto id = slot();
  Counted counted;
  WeightGradStore store(sink);
  store.put(id, counted.product(256));
  store.put(id, counted.product(1));
  store.put(id, counted.product(-256, at::kBFloat16));
  store.run();
  EXPECT_EQ(counted.written, 1);
  EXPECT_EQ(counted.formed, 2);
  EXPECT_TRUE(at::equal(owner.slot, at::ones({4})));
  EXPECT_EQ(owner.tickets, 0);
  EXPECT_EQ(sink.open_tickets(), 0U);
}

// ---------------------------------------------------------------------------------------- tickets

TEST_F(Sink, ATicketIsOpenFromPromiseToRedeem) {
  const auto id = slot();
  const auto first = sink.promise(id, "layer 4", 2);
  const auto second = sink.promise(id, "layer 4", 3);
  EXPECT_EQ(owner.tickets, 2);
  EXPECT_EQ(sink.open_tickets(), 2U);
  sink.redeem(second, full(1, at::kFloat));
  sink.redeem(first, full(2, at::kBFloat16));
  EXPECT_EQ(owner.tickets, 0);
  EXPECT_EQ(sink.open_tickets(), 0U);
  EXPECT_TRUE(at::equal(owner.slot, at::full({4}, 3.0F)));
  sink.require_all_redeemed("step");
}

TEST_F(Sink, ATicketMayBeRedeemedWithNothing) {
  const auto ticket = sink.promise(slot(), "layer 4", 2);
  sink.redeem(ticket, at::Tensor());
  EXPECT_EQ(sink.open_tickets(), 0U);
  EXPECT_TRUE(owner.opened.empty());
}

TEST_F(Sink, RedeemedTwiceNamesLayerAndMicroBatch) {
  const auto id = slot();
  const auto ticket = sink.promise(id, "layer 4", 2);
  sink.redeem(ticket, full(1, at::kFloat));
  EXPECT_THAT(refusal([&] { sink.redeem(ticket, full(1, at::kFloat)); }),
              Says("model.norm.weight", "layer 4", "micro-batch 2", "twice"));
  EXPECT_TRUE(at::equal(owner.slot, at::ones({4}))) << "the second was not added";
  EXPECT_EQ(owner.tickets, 0);
}

// Naive: the book of tickets is emptied with the step, and a ticket of an earlier one is only
// "unknown".
TEST_F(Sink, RedeemedTwiceIsNamedSoInAnyLaterStep) {
  const auto id = slot();
  const auto ticket = sink.promise(id, "layer 4", 2);
  sink.redeem(ticket, full(1, at::kFloat));
  for (int i = 0; i < 10; ++i) sink.redeem(sink.promise(id, "layer 5", i), at::Tensor());
  EXPECT_THAT(refusal([&] { sink.redeem(ticket, full(1, at::kFloat)); }),
              Says("layer 4", "micro-batch 2", "twice"));
}

TEST_F(Sink, AnEmptyTicketAndOneOfAnotherSinkAreRefused) {
  EXPECT_THAT(refusal([&] { sink.redeem(Ticket(), full(1, at::kFloat)); }), Says("empty"));
  GradSink other;
  const auto ticket = other.promise(other.add(&contract, &owner, 5), "layer 4", 2);
  EXPECT_THAT(refusal([&] { sink.redeem(ticket, full(1, at::kFloat)); }),
              Says("another model", "layer 4"));
  EXPECT_EQ(other.open_tickets(), 1U);
}

TEST_F(Sink, WhatIsLeftOverIsNamed) {
  const auto id = slot();
  sink.redeem(sink.promise(id, "layer 1", 0), full(1, at::kFloat));
  sink.promise(id, "layer 2", 0);
  sink.promise(id, "layer 2", 1);
  const auto error = refusal([&] { sink.require_all_redeemed("optimizer step"); });
  EXPECT_THAT(error,
              Says("optimizer step: found 2", "layer 2, micro-batch 0", "layer 2, micro-batch 1"));
  EXPECT_THAT(error, Not(Says("layer 1")));
}

TEST_F(Sink, AWrongGradientLeavesItsTicketOpen) {
  const auto ticket = sink.promise(slot(), "layer 4", 2);
  EXPECT_THAT(refusal([&] { sink.redeem(ticket, at::zeros({3})); }),
              Says("a deferred weight gradient"));
  EXPECT_EQ(sink.open_tickets(), 1U);
  sink.redeem(ticket, full(1, at::kFloat));
}

TEST_F(Sink, DroppedTicketsAreForgottenAndRefusedByName) {
  const auto id = slot();
  const auto ticket = sink.promise(id, "layer 4", 2);
  sink.drop_tickets();
  sink.require_all_redeemed("step");
  EXPECT_THAT(refusal([&] { sink.redeem(ticket, full(1, at::kFloat)); }),
              Says("failed", "layer 4", "micro-batch 2"));
  EXPECT_TRUE(owner.opened.empty());
}

// Naive: the book grows by an entry a layer and micro-batch for as long as one ticket is open.
TEST_F(Sink, NothingIsRememberedOfWhatIsRedeemed) {
  const auto id = slot();
  const auto open = sink.promise(id, "layer 0", 0);
  for (int i = 0; i < 1000; ++i) {
    sink.redeem(sink.promise(id, "layer", i), full(0, at::kFloat));
    EXPECT_EQ(sink.open_tickets(), 1U);
  }
  sink.redeem(open, at::Tensor());
  EXPECT_EQ(sink.open_tickets(), 0U);
}

}  // namespace
}  // namespace tessera::grad::sink_test
