// The list (kernels.h) as operations of libtorch's dispatcher, for whoever watches operations go by
// (capture/replay/tape.h). [Note: watched kernels]
//
// A kernel reads and writes through pointers, which nobody sees: a recording that missed one would
// replay memory that nothing fills. So a function of the list that is called while its thread is
// watched goes through the dispatcher, under its name and with its writes declared; else it is
// called at once. The operations are registered when somebody asks for them, not by a static object:
// the linker drops those of an archive that nothing names. On meta tensors they are those of aten/.
// Next: watch.h, ../capture/replay/tape.h.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "kernels/watch.h"

namespace tessera::kernels {

/// Whether operations of this thread are seen. Under grad mode autograd sees them first: what a
/// kernel is made of then, one by one.
inline bool are_watched() {
  return c10::impl::tls_is_dispatch_key_included(kWatchKey) &&
         !c10::impl::tls_is_dispatch_key_excluded(kWatchKey) && !c10::GradMode::is_enabled() &&
         watcher_of_this_thread() != nullptr && watcher_of_this_thread()->sees_kernels();
}

/// Once a process; again: nothing happens. Threads: any.
void register_operations();

/// "tessera::NAME" of the list, with the type of its function.
template <class Function>
c10::TypedOperatorHandle<Function> operation(const char* name) {
  register_operations();
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Function>();
}

}  // namespace tessera::kernels

/// First in a function of the list: seen by whoever watches.
#define TESSERA_WATCHED(name, ...)                                                  \
  if (are_watched()) {                                                              \
    static const auto seen = operation<decltype(kernels::name)>("tessera::" #name); \
    return seen.call(__VA_ARGS__);                                                  \
  }                                                                                 \
  static_assert(true)
