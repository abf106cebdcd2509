// What stays for good is made apart from what a step takes and gives back.
//
// Regions are recorded, and their entries made, while activations are there: many small pieces among
// large ones, which would keep those from growing together again when they are free. What a thread
// makes lies in another part of the heap (an arena of glibc's; any other allocator does no harm), and
// threads that come later have that of the ones before.
#pragma once

#include <future>
#include <utility>

namespace tessera::capture {

/// make() on a thread of its own, which knows nothing of this one's modes and guards.
template <class Make>
auto run_on_helper_thread(Make&& make) {
  return std::async(std::launch::async, std::forward<Make>(make)).get();
}

}  // namespace tessera::capture
