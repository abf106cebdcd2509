#include "sim/hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "sim/guard.h"
#include "sim/operations.h"
#include "sim/pinned.h"
#include "sim/sim.h"

namespace tessera::sim {
namespace {

/// Seed and offset, as a GPU's counter-based generator has them. To keep and restore its state is
/// allowed always: recomputation does; what is refused is to draw (fallback.cpp).
class Draws final : public c10::GeneratorImpl {
 public:
  explicit Draws(c10::DeviceIndex index)
      : GeneratorImpl(sim::device(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(std::uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(std::uint64_t offset) override { offset_ = offset; }
  std::uint64_t get_offset() const override { return offset_; }
  std::uint64_t current_seed() const override { return seed_; }
  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == kBytes && state.device_type() == c10::kCPU,
                "sim: expected a generator's state of ", kBytes, " bytes on the CPU");
    const auto* from = static_cast<const char*>(state.data());
    std::memcpy(&seed_, from, sizeof(seed_));
    std::memcpy(&offset_, from + sizeof(seed_), sizeof(offset_));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor state = at::empty({kBytes}, at::kByte);
    auto* to = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(to, &seed_, sizeof(seed_));
    std::memcpy(to + sizeof(seed_), &offset_, sizeof(offset_));
    return state.getIntrusivePtr();
  }

 private:
  static constexpr std::int64_t kBytes = 2 * sizeof(std::uint64_t);

  Draws* clone_impl() const override {
    auto* copy = new Draws(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  std::uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& generator_of(c10::DeviceIndex index) {
  static auto* const generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); ++i) {
      all->push_back(at::make_generator<Draws>(static_cast<c10::DeviceIndex>(i)));
    }
    return all;
  }();
  return generators->at(static_cast<std::size_t>(index < 0 ? current_device() : index));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchange_device(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index = -1) const override {
    return generator_of(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index = -1) const override {
    return at::make_generator<Draws>(index < 0 ? current_device() : index);
  }

  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

std::atomic<int> draws_allowed = 0;

}  // namespace

void register_hooks() {
  generator_of(0);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

std::optional<at::Generator> draw_from(c10::DeviceIndex index) {
  if (draws_allowed == 0) return std::nullopt;
  at::Generator generator = generator_of(index);
  const std::lock_guard lock(generator.mutex());
  const std::uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 4);
  return at::make_generator<at::CPUGeneratorImpl>(generator.current_seed() * 0x9E3779B97F4A7C15U +
                                                  offset);
}

AllowDraws::AllowDraws() { ++draws_allowed; }
AllowDraws::~AllowDraws() { --draws_allowed; }

}  // namespace tessera::sim
