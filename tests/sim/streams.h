// Short forms of the simulator's tests.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "sim/sim.h"
#include "support/tensors.h"

namespace tessera::sim {

inline at::TensorOptions on(int index, at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions(dtype).device(device(index));
}

inline c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
}
inline c10::Stream current(int index) { return guard().getStream(device(index)); }
inline c10::Stream new_stream(int index) { return guard().getNewStream(device(index)); }

/// Orders what is launched later on `waiting` after what was launched on `other`.
inline void wait_for(const c10::Stream& waiting, const c10::Stream& other) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(other);
  event.block(waiting);
}

/// Normal numbers on the CPU.
inline at::Tensor drawn(std::uint64_t seed, at::IntArrayRef shape,
                        at::ScalarType dtype = at::kFloat) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed)).to(dtype);
}

/// `program` on that stream.
template <class Program>
auto run_on(const c10::Stream& stream, const Program& program) {
  const c10::StreamGuard here(stream);
  return program();
}

/// Tests with an answer to whether a device is done.
class WhenDone : public testing::TestWithParam<Done> {
 protected:
  void SetUp() override { set_done(GetParam()); }
  void TearDown() override { set_done(Done::kAtOnce); }
};

/// Returns the report of the first operation that races, and clears it; empty where none does.
template <class Program>
std::string race_of(const Program& program) {
  std::string text;
  try {
    program();
  } catch (const Race& race) {
    text = race.what();
  }
  if (!text.empty()) settle();
  const std::vector<std::string> races = take_races();
  EXPECT_EQ(races, text.empty() ? std::vector<std::string>() : std::vector<std::string>{text});
  return text;
}

/// Returns the error of an operation that is refused; empty where none is.
template <class Program>
std::string refusal_of(const Program& program) {
  try {
    program();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

inline void expect_same_bits(const at::Tensor& found, const at::Tensor& expected,
                             const std::string& what) {
  EXPECT_TRUE(test::same_bits(found, expected)) << what;
}

}  // namespace tessera::sim
