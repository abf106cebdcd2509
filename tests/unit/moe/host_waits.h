// Counts the calls of a thread that would wait for a device: on the CPU, by the names of
// operations.
#pragma once

#include <ATen/record_function.h>

#include <array>
#include <cstdint>
#include <string_view>

namespace tessera::moe {

/// Counts on the thread that makes it, while it lives; one at a time.
class HostWaits {
 public:
  HostWaits() : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&seen))) {
    reads_ = 0;
    others_ = 0;
  }
  ~HostWaits() { at::removeCallback(handle_); }
  HostWaits(const HostWaits&) = delete;
  HostWaits& operator=(const HostWaits&) = delete;

  std::int64_t reads() const { return reads_; }    ///< through read_on_host
  std::int64_t others() const { return others_; }  ///< anything else

 private:
  static std::unique_ptr<at::ObserverContext> seen(const at::RecordFunction& function) {
    // Values, and sizes that depend on values.
    static constexpr std::array<std::string_view, 8> kWaiting{"aten::_local_scalar_dense",
                                                              "aten::nonzero",
                                                              "aten::masked_select",
                                                              "aten::bincount",
                                                              "aten::equal",
                                                              "aten::is_nonzero",
                                                              "aten::repeat_interleave",
                                                              "aten::_unique2"};
    const std::string_view name = function.name();
    if (name == "tessera::host_read") ++reads_;
    for (const std::string_view waiting : kWaiting) others_ += name == waiting ? 1 : 0;
    return nullptr;
  }

  static inline thread_local std::int64_t reads_ = 0;
  static inline thread_local std::int64_t others_ = 0;
  at::CallbackHandle handle_;
};

}  // namespace tessera::moe
