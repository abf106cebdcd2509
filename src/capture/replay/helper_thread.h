// Makes what stays for good separate from what a step allocates and frees.
//
// Regions are recorded, and their entries made, while activations are there: many small pieces
// among large ones, which would keep the free memory from growing together again. What a thread
// makes lies in another part of the heap (an arena of glibc's; other allocators do no harm), and
// later threads use the arena of earlier ones.
#pragma once

#include <future>
#include <utility>

namespace tessera::capture {

/// Runs make() on a new thread, which has none of this thread's modes and guards.
template <class Make>
auto run_on_helper_thread(Make&& make) {
  return std::async(std::launch::async, std::forward<Make>(make)).get();
}

}  // namespace tessera::capture
