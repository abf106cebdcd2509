// The requirements on an operation and a backend: types with all functions, rows of one table.
#include "comm/ops/operation.h"

#include "comm/backends/backend.h"
#include "comm/ops/steps.h"
#include "support/test.h"
#include "tessera/world.h"

namespace tessera::comm::operation_test {
namespace {

// An all-gather but for one answer: its copy is another type.
struct LacksACopy : AllGather {};

template <class Op>
concept FitsIntoABatch = requires { typename OneOf<Op>; };

// Naive: dispatch that ends with "else the last one" compiles, and throws on the wire.
TEST(Operation, ATypeThatLacksAnAnswerFitsIntoNoBatch) {
  EXPECT_FALSE(FitsIntoABatch<LacksACopy>);
  EXPECT_FALSE(FitsIntoABatch<at::Tensor>);
  EXPECT_TRUE(FitsIntoABatch<AllGather>);
}

/// An operation that sends from each rank to the next one: nothing but this struct.
struct Shift {
  at::Tensor out;
  at::Tensor in;

  class Sends final : public Steps {
   public:
    explicit Sends(const Shift& op) : op_(op) {}
    void post_receives(Transfers& transfers, int round) override {
      const int from = (transfers.self() + transfers.size() - 1) % transfers.size();
      transfers.receive(from, op_.in.mutable_data_ptr(), op_.sent_bytes(0, 0), round);
    }
    void post_sends(Transfers& transfers, int round) override {
      const int to = (transfers.self() + 1) % transfers.size();
      transfers.send(to, op_.out.const_data_ptr(), op_.sent_bytes(0, 0), round);
    }

   private:
    const Shift& op_;
  };

  const at::Tensor& first_tensor() const { return out; }
  OpFacts facts() const { return {Kind::kBatch, 0, out.scalar_type(), in.scalar_type()}; }
  std::uint32_t bucket_or(std::uint32_t otherwise) const { return otherwise; }
  void check(const CheckedBatch& batch) const { batch.require_usable(out); }
  std::int64_t sent_bytes(int, int) const { return static_cast<std::int64_t>(out.nbytes()); }
  bool is_relayed(int) const { return false; }
  void run_alone() const { in.copy_(out); }
  std::unique_ptr<Steps> steps(int, int) const { return std::make_unique<Sends>(*this); }
  static void run_on_devices(const std::vector<const Shift*>& ranks) {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      ranks[(i + 1) % ranks.size()]->in.copy_(ranks[i]->out);
    }
  }
  Shift cloned(const MakeTwin& make) const {
    return {make(out, Values::kKept), make(in, Values::kOverwritten)};
  }
  void deliver(const Shift& to) const { to.in.copy_(in); }
};

TEST(Operation, ANewOneIsOneStruct) { EXPECT_TRUE(FitsIntoABatch<Shift>); }

TEST(Backends, AreRowsByTheirNames) {
  EXPECT_EQ(backend_named("gloo", at::kCPU).name, "gloo");
  EXPECT_TRUE(backend_named("gloo", at::kCPU).built_in());
  EXPECT_EQ(backend_named("nccl", at::kCUDA).name, "nccl");
  try {
    backend_named("carrier pigeon", at::kCPU);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_STREQ(error.what(), "world: found backend carrier pigeon, expected auto, gloo or nccl");
  }
}

TEST(Backends, AutoIsTheFirstThatCarriesTheDeviceByItselfElseThroughTheHost) {
  EXPECT_EQ(backend_named("auto", at::kCPU).name, "gloo");
  EXPECT_EQ(backend_named("auto", at::kCUDA).name, "nccl");
  EXPECT_EQ(backend_named("auto", at::kXPU).name, "gloo");
  EXPECT_EQ(backend_named("gloo", at::kCUDA).name, "gloo") << "who asks for it gets it";
}

/// Returns the refusal of a World's options, before it connects.
std::string refusal(const WorldOptions& options) {
  return refusal_of([&] { World::connect(options); });
}

// Naive: every group is opened, and the first agreement finds tensors of the other device.
TEST(Backends, OneThatDoesNotCarryTheDeviceIsRefusedByAWorldOfOneToo) {
  WorldOptions options;
  options.backend = "nccl";
  EXPECT_EQ(refusal(options),
            "config: world: found backend nccl with device cpu, expected device cuda, whose "
            "tensors it carries; set device to cuda, or backend to gloo");
}

TEST(Backends, OneThatDoesNotCarryTheDeviceIsRefusedByRanksThatAreThreadsToo) {
  EXPECT_THAT(thrown_by([] { launch_threads(2, ThreadBackend::kNccl, [](World&) {}); }),
              Says("found backend nccl with device cpu"));
}

TEST(Backends, ADeviceThatIsNoneIsRefused) {
  WorldOptions options;
  options.device = "toaster";
  EXPECT_EQ(refusal(options),
            "usage: world: found device 'toaster', expected auto, cpu, or an accelerator that "
            "libtorch knows, as cuda or cuda:0");
  options.device = "meta";
  EXPECT_NE(refusal(options), "");
}

TEST(Backends, OneThatIsNotUsableIsRefusedAsItIsOpened) {
  for (const BackendRow& row : backends()) {
    const bool has_device = row.device != at::kCUDA || cuda_devices() > 0;
    if (row.built_in() && has_device) continue;
    EXPECT_THROW(row.open({}), Error) << row.name;
  }
}

}  // namespace
}  // namespace tessera::comm::operation_test
