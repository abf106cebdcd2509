// The list (kernels.h) as operations of libtorch's dispatcher, for code that watches operations
// (capture/replay/tape.h). [Note: watched kernels]
//
// A kernel reads and writes through pointers, which a watcher cannot see: a recording that missed
// one would replay memory that nothing fills. So a function of the list that is called while its
// thread is watched goes through the dispatcher, under its name and with its writes declared;
// otherwise it is called directly. The operations are registered on request, not by a static
// object: the linker drops those of an archive that nothing names. On meta tensors they are those
// of aten/. Next: watch.h, ../capture/replay/tape.h.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "kernels/watch.h"

namespace tessera::kernels {

/// Whether operations of this thread are seen. Under grad mode autograd sees them first: then the
/// operations of which a kernel is made are seen, one by one.
inline bool are_watched() {
  return c10::impl::tls_is_dispatch_key_included(kWatchKey) &&
         !c10::impl::tls_is_dispatch_key_excluded(kWatchKey) && !c10::GradMode::is_enabled() &&
         watcher_of_this_thread() != nullptr && watcher_of_this_thread()->sees_kernels();
}

/// Registers the operations; later calls do nothing. Threads: any.
void register_operations();

/// Calls "tessera::NAME" of the list, with the type of its function.
template <class Function>
c10::TypedOperatorHandle<Function> operation(const char* name) {
  register_operations();
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Function>();
}

}  // namespace tessera::kernels

/// The first statement of a function of the list: shows the call to the thread's watcher.
#define TESSERA_WATCHED(name, ...)                                                  \
  if (are_watched()) {                                                              \
    static const auto seen = operation<decltype(kernels::name)>("tessera::" #name); \
    return seen.call(__VA_ARGS__);                                                  \
  }                                                                                 \
  static_assert(true)
