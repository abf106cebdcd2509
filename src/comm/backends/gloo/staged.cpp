#include "comm/backends/gloo/staged.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "comm/backends/gloo/gloo_mail.h"
#include "comm/batch.h"
#include "comm/host_read.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// In the host's memory; its values come on the current stream.
at::Tensor staged(const at::Tensor& of, Values values) {
  at::Tensor twin = pinned_like(of);
  if (values == Values::kKept) twin.copy_(of, /*non_blocking=*/true);
  return twin;
}

/// Until what was launched on the stream has arrived on the host.
void wait_for_copies(const Stream& stream, const std::string& what) {
  Event copied;
  copied.record(stream, EventSite::kHostRead);
  wait_on_host(copied, what);
}

/// Who lets go of it has nothing under way on the device.
class StagedWork final : public Work {
 public:
  StagedWork(std::unique_ptr<Work> carried, Batch twins, Batch batch, const Stream& stream)
      : twins_(std::move(twins)),
        batch_(std::move(batch)),
        stream_(stream),
        carried_(std::move(carried)) {}

  void wait() override {
    if (!carried_) return;
    carried_->wait();
    Event end;
    {
      const StreamScope there(stream_);
      const c10::AutoGradMode no_grad(false);
      deliver(twins_, batch_);
      end.record(stream_, EventSite::kWorkEnd);
    }
    end.block(Stream::current(stream_.device()), EventSite::kWorkEnd);
    carried_.reset();
    twins_.ops.clear();
    batch_.ops.clear();
  }

 private:
  Batch twins_;
  Batch batch_;
  const Stream stream_;
  std::unique_ptr<Work> carried_;  // goes before the memory that it writes; null: waited for
};

class StagedLetter final : public Carried {
 public:
  StagedLetter(Letter letter, std::unique_ptr<Transfer> twins, at::Tensor twin)
      : Carried(std::move(letter)), twins_(std::move(twins)), twin_(std::move(twin)) {}

  Event finish() override {
    twins_->wait();
    return brought();
  }
  std::optional<Event> poll() override {
    if (!twins_->done()) return std::nullopt;
    return brought();
  }
  void let_go(const Stream& stream) override { end_.block(stream, EventSite::kMailEnd); }

 private:
  /// What was received goes to the device.
  Event brought() {
    if (twin_.defined() && !letter_.sends()) {
      const StreamScope there(letter_.stream);
      const c10::AutoGradMode no_grad(false);
      letter_.tensor.copy_(twin_, /*non_blocking=*/true);
      end_.record(letter_.stream, EventSite::kMailEnd);
    }
    twin_.reset();
    return end_;
  }

  const std::unique_ptr<Transfer> twins_;
  at::Tensor twin_;  // on the host
  Event end_;        // of what is launched; none: nothing is
};

class StagedMail final : public Mail {
 public:
  StagedMail(GlooMail& host, MailPlace place) : Mail(std::move(place)), host_(host) {}

 private:
  std::unique_ptr<Transfer> post(Letter letter) override {
    letter.posted.block(letter.stream, EventSite::kMailPost);
    Letter carried{letter.end, letter.tag, letter.peer, letter.peer_rank, {}};
    {
      const StreamScope there(letter.stream);
      const c10::AutoGradMode no_grad(false);
      carried.tensor = staged(letter.tensor, letter.sends() ? Values::kKept : Values::kOverwritten);
    }
    if (letter.sends()) wait_for_copies(letter.stream, to_string(letter));
    at::Tensor twin = carried.tensor;
    auto twins = host_.post(std::move(carried));
    return std::make_unique<Transfer>(
        place(),
        std::make_shared<StagedLetter>(std::move(letter), std::move(twins), std::move(twin)));
  }

  GlooMail& host_;
};

class StagedGroup final : public Group {
 public:
  StagedGroup(std::shared_ptr<PointToPointGroup> host, const GroupPlace& place)
      : host_(std::move(host)),
        device_(place.device),
        members_(place.ranks),
        abort_flag_(place.abort_flag) {}

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  const std::string& name() const override { return host_->name(); }

  Mail& mail() override {
    GlooMail& host = host_->gloo_mail();
    if (!mail_) {
      mail_ = std::make_unique<StagedMail>(host, MailPlace{members_, rank(), device_, abort_flag_});
    }
    return *mail_;
  }

 private:
  std::unique_ptr<Work> start(Batch batch) override {
    require_no_mail(mail_.get(), name());
    check_batch(batch, size(), device_);
    Batch twins = cloned(batch, staged);
    wait_for_copies(stream(), concat(to_string(batch.label.kind), " of ", batch.label.unit));
    auto carried = host_->issue(twins);
    return std::make_unique<StagedWork>(std::move(carried), std::move(twins), std::move(batch),
                                        stream());
  }

  const std::shared_ptr<PointToPointGroup> host_;
  const at::Device device_;
  const std::vector<int> members_;
  const std::shared_ptr<AbortFlag> abort_flag_;
  std::unique_ptr<StagedMail> mail_;
};

}  // namespace

std::shared_ptr<Group> stage(std::shared_ptr<PointToPointGroup> host, const GroupPlace& place) {
  return std::make_shared<StagedGroup>(std::move(host), place);
}

}  // namespace tessera::comm
