#include "comm/stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::comm {

Stream Stream::current_of(c10::Device device) {
  return Stream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

Stream Stream::made_of(c10::Device device) {
  return Stream(c10::impl::VirtualGuardImpl(device.type()).getNewStream(device));
}

void Event::record(const Stream& stream) {
  if (!stream) {
    event_.reset();
    return;
  }
  // A copy goes on marking the old point, and an event stays on the device of its first record.
  const bool reusable = event_ != nullptr && event_.use_count() == 1 &&
                        event_->device_type() == stream.device().type() &&
                        event_->device_index() == stream.device().index();
  if (!reusable) event_ = std::make_shared<c10::Event>(stream.device().type());
  event_->record(stream.get());
}

}  // namespace tessera::comm
