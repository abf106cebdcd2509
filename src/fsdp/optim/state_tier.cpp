#include "fsdp/optim/state_tier.h"

#include <cstddef>
#include <deque>
#include <exception>
#include <span>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "base/trace.h"
#include "io/scratch_file.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

class FileTier final : public StateTier {
 public:
  FileTier(std::filesystem::path folder, std::string whose)
      : file_(std::move(folder), std::move(whose)), thread_([this] { work(); }) {}

  ~FileTier() override {
    {
      const base::Lock lock(mutex_);
      ends_ = true;
    }
    asked_.notify_one();
    thread_.join();
  }

  void reserve(std::int64_t bytes) override { file_.reserve(bytes); }

  Ticket read(std::int64_t offset, const at::Tensor& bytes) override {
    return ask({offset, bytes, true});
  }
  Ticket write(std::int64_t offset, const at::Tensor& bytes) override {
    return ask({offset, bytes, false});
  }

  Ticket last() const override {
    const base::Lock lock(mutex_);
    return given_;
  }
  double busy_ms() const override {
    const base::Lock lock(mutex_);
    return busy_ms_;
  }

  void wait(Ticket ticket) override {
    base::Lock lock(mutex_);
    done_changed_.wait(lock, [&]() TESSERA_REQUIRES(mutex_) {
      return error_ == nullptr ? done_ >= ticket : requests_.empty();
    });
    if (error_ == nullptr) return;
    const auto error = std::exchange(error_, nullptr);
    done_ = given_;  // what was dropped
    lock.unlock();
    std::rethrow_exception(error);
  }

 private:
  struct Request {
    std::int64_t offset;
    at::Tensor bytes;
    bool reads;
  };

  Ticket ask(Request request) {
    TESSERA_INVARIANT(request.bytes.scalar_type() == at::kByte && request.bytes.is_contiguous() &&
                          request.bytes.is_cpu(),
                      "a transfer of what is no bytes of the host");
    Ticket ticket = 0;
    {
      const base::Lock lock(mutex_);
      requests_.push_back(std::move(request));
      ticket = ++given_;
    }
    asked_.notify_one();
    return ticket;
  }

  void work() {
    base::Lock lock(mutex_);
    for (;;) {
      asked_.wait(lock, [&]() TESSERA_REQUIRES(mutex_) { return ends_ || !requests_.empty(); });
      if (requests_.empty()) return;
      if (error_ == nullptr) {
        // The front stays, so that wait() sees what is under way.
        const Request request = requests_.front();
        lock.unlock();
        const auto begin = TraceClock::now();
        auto error = failure_of(request);
        const std::chrono::duration<double, std::milli> took = TraceClock::now() - begin;
        lock.lock();
        busy_ms_ += took.count();
        error_ = std::move(error);
      }
      requests_.pop_front();
      if (error_ == nullptr) ++done_;
      done_changed_.notify_all();
    }
  }

  std::exception_ptr failure_of(const Request& request) const {
    auto* const data = static_cast<std::byte*>(request.bytes.mutable_data_ptr());
    try {
      if (request.reads) {
        file_.read(request.offset, {data, request.bytes.nbytes()});
      } else {
        file_.write(request.offset, {data, request.bytes.nbytes()});
      }
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  ScratchFile file_;
  mutable base::Mutex mutex_;
  base::Condition asked_, done_changed_;
  std::deque<Request> requests_ TESSERA_GUARDED_BY(mutex_);
  Ticket given_ TESSERA_GUARDED_BY(mutex_) = 0;
  Ticket done_ TESSERA_GUARDED_BY(mutex_) = 0;
  double busy_ms_ TESSERA_GUARDED_BY(mutex_) = 0.0;
  std::exception_ptr error_ TESSERA_GUARDED_BY(mutex_);
  bool ends_ TESSERA_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses all of these
};

}  // namespace

std::unique_ptr<StateTier> make_file_tier(std::filesystem::path folder, std::string whose) {
  return std::make_unique<FileTier>(std::move(folder), std::move(whose));
}

}  // namespace tessera::fsdp
