// What a forward reads besides its inputs and parameters: the default CPU generator and autocast.
//
// A recomputation must find both as the first forward did. Private to recompute.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <array>

namespace tessera::fsdp {

/// State of libtorch's default CPU generator (5 KB).
at::Tensor random_state();

/// Random numbers as they came the first time; afterwards they go on where they were. An undefined
/// state: nothing was drawn, nothing changes.
class RandomStateScope {
 public:
  explicit RandomStateScope(const at::Tensor& state);
  ~RandomStateScope();
  RandomStateScope(const RandomStateScope&) = delete;
  RandomStateScope& operator=(const RandomStateScope&) = delete;

 private:
  at::Tensor before_;
};

/// This thread's autocast of every device that has a model's kernels.
struct Autocast {
  struct OfDevice {
    bool enabled = false;
    at::ScalarType dtype = at::kFloat;
  };
  std::array<OfDevice, 2> devices;
  static Autocast now();
};

/// Autocast as given, without its cache of casted weights: a cast that was made without grad in the
/// first forward must not stand for one with grad, here or later in the same autocast region.
class AutocastScope {
 public:
  explicit AutocastScope(const Autocast& state);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  Autocast before_;
  bool cached_before_;
};

}  // namespace tessera::fsdp
