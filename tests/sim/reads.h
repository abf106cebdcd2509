// How often the host reads from a device.
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <string_view>

namespace tessera::sim {

/// Calls of comm::read_on_host() by this thread since it was made.
class Reads {
 public:
  Reads() : before_(of_thread()) {
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          if (std::string_view(function.name()) == "tessera::host_read") ++of_thread();
          return nullptr;
        }).scopes({at::RecordScope::USER_SCOPE}));
  }
  ~Reads() { at::removeCallback(handle_); }
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;
  int count() const { return of_thread() - before_; }

 private:
  static int& of_thread() {
    thread_local int reads = 0;
    return reads;
  }

  int before_;
  at::CallbackHandle handle_;
};

}  // namespace tessera::sim
