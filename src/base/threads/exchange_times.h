// The time that exchanges of activations take, as a rank's host sees it. Pure.
#pragma once

namespace tessera::base {

/// The times of exchanges of this thread's rank so far, in ms: how long any were under way (from
/// the issue to the end of the wait), and how long the host waited for one. Exchanges on a device
/// are left out, since the host does not wait for them.
struct ExchangeTimes {
  double in_flight = 0;
  double waited = 0;

  double hidden() const { return in_flight - waited; }
  ExchangeTimes operator-(const ExchangeTimes& before) const {
    return {in_flight - before.in_flight, waited - before.waited};
  }
};
ExchangeTimes exchange_times();

/// Counts an exchange as under way until end() or its destruction.
class ExchangeUnderWay {
 public:
  /// `counts`: false on a device.
  explicit ExchangeUnderWay(bool counts);
  ExchangeUnderWay(ExchangeUnderWay&& other) noexcept;
  ~ExchangeUnderWay() { end(0); }
  ExchangeUnderWay(const ExchangeUnderWay&) = delete;
  ExchangeUnderWay& operator=(const ExchangeUnderWay&) = delete;
  ExchangeUnderWay& operator=(ExchangeUnderWay&&) = delete;

  /// `waited_ms`: how long the host waited for it. Does nothing the second time.
  void end(double waited_ms);

 private:
  bool counts_;
};

}  // namespace tessera::base
