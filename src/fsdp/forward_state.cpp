#include "fsdp/forward_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>

#include <mutex>

namespace tessera::fsdp {
namespace {

constexpr std::array kDevices{at::kCPU, at::kCUDA};

void set_random_state(const at::Tensor& state) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

void set_autocast(const Autocast& state) {
  for (std::size_t i = 0; i < kDevices.size(); ++i) {
    at::autocast::set_autocast_enabled(kDevices[i], state.devices[i].enabled);
    at::autocast::set_autocast_dtype(kDevices[i], state.devices[i].dtype);
  }
}

}  // namespace

at::Tensor random_state() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

RandomStateScope::RandomStateScope(const at::Tensor& state) {
  if (!state.defined()) return;
  before_ = random_state();
  set_random_state(state);
}

RandomStateScope::~RandomStateScope() {
  if (before_.defined()) set_random_state(before_);
}

Autocast Autocast::now() {
  Autocast state;
  for (std::size_t i = 0; i < kDevices.size(); ++i) {
    state.devices[i] = {at::autocast::is_autocast_enabled(kDevices[i]),
                        at::autocast::get_autocast_dtype(kDevices[i])};
  }
  return state;
}

AutocastScope::AutocastScope(const Autocast& state)
    : before_(Autocast::now()), cached_before_(at::autocast::is_autocast_cache_enabled()) {
  set_autocast(state);
  at::autocast::set_autocast_cache_enabled(false);
}

AutocastScope::~AutocastScope() {
  set_autocast(before_);
  at::autocast::set_autocast_cache_enabled(cached_before_);
}

}  // namespace tessera::fsdp
