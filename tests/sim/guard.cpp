#include "sim/guard.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <utility>

#include "sim/memory.h"
#include "sim/sim.h"
#include "sim/simulator.h"

namespace tessera::sim {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

int devices_there = 0;
thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, kMostDevices> streams_of_thread{};  // 0: the default one
std::array<std::atomic<c10::StreamId>, kMostDevices> streams_made{};
std::array<std::atomic<int>, kMostDevices> urgent_streams{};

std::size_t checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < devices_there, "sim: found device ", static_cast<int>(index),
              ", expected one of the ", devices_there, " that are there");
  return static_cast<std::size_t>(index);
}

c10::DeviceIndex index_of(const c10::Device& device) {
  return device.has_index() ? device.index() : device_of_thread;
}

c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), id);
}

/// The object to which an event's handle points from its first record on.
struct Event {
  Mark mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return sim::device(exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return sim::device(device_of_thread); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_of_thread = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(devices_there);
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  // Always a new one: two users on one stream by chance would hide a missing event.
  c10::Stream getNewStream(c10::Device device, int priority = 0) const override {
    const c10::DeviceIndex index = index_of(device);
    if (priority < 0) ++urgent_streams.at(checked(index));
    return stream_of(index, ++streams_made.at(checked(index)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*first*/ = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::DeviceIndex index = stream.device_index();
    const auto before = std::exchange(streams_of_thread.at(checked(index)), stream.id());
    return stream_of(index, before);
  }
  bool queryStream(const c10::Stream& stream) const override { return ask(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_on_host(stream, "synchronize stream");
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    wait_on_host(index, "synchronize device");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index,
              const c10::EventFlag /*flag*/) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(), "sim: found an event of device ",
                static_cast<int>(index), " and a stream of device ",
                static_cast<int>(stream.device_index()), ", expected those of one device");
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->mark = sim::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) sim::block(stream, static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || ask(static_cast<Event*>(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_on_host(static_cast<Event*>(event)->mark, "synchronize event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*index*/) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "sim: both events have to be recorded");
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(second)->mark.time -
                                                     static_cast<Event*>(first)->mark.time)
        .count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    device_memory().recordStream(ptr, stream);
  }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override { return {}; }
};

}  // namespace

void register_guard(int count) {
  TORCH_CHECK(count >= 1 && count <= kMostDevices, "sim: found ", count, " devices, expected 1 to ",
              kMostDevices);
  devices_there = count;
  static const c10::impl::DeviceGuardImplRegistrar registrar(kType, new Guard);
}

int device_count() { return devices_there; }

c10::DeviceIndex current_device() { return device_of_thread; }

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  checked(index);
  return std::exchange(device_of_thread, index);
}

c10::Stream current_stream(c10::DeviceIndex index) {
  return stream_of(index, streams_of_thread.at(checked(index)));
}

int streams_of_higher_priority(int index) {
  return urgent_streams.at(checked(static_cast<c10::DeviceIndex>(index)));
}

c10::Device device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

}  // namespace tessera::sim
