#include "base/threads/product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

/// Sets the number of threads of the products that the calling thread begins and returns the one
/// before; 0 stands for the number of the process. libtorch_cpu has it where it is built with MKL.
extern "C" [[gnu::weak]] int MKL_Set_Num_Threads_Local(int threads);

namespace tessera::base {
namespace {

/// One core takes some 25 microseconds for this number: about as long as waking another thread
/// takes, which sleeps where the last product on both was too long ago (launch/rank_variables.h).
constexpr std::int64_t kMultiplicationsOfOneThread = std::int64_t{5} << 18;

thread_local int scopes = 0;

bool is_small(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && a.dim() >= 2 && b.dim() == a.dim() &&
         a.numel() * b.size(-1) <= kMultiplicationsOfOneThread;
}

}  // namespace

OneThread::OneThread(bool wanted) : wanted_(wanted) {
  if (!wanted_) return;
  ++scopes;
  if (MKL_Set_Num_Threads_Local != nullptr) before_ = MKL_Set_Num_Threads_Local(1);
}

OneThread::~OneThread() {
  if (!wanted_) return;
  --scopes;
  if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(before_);
}

bool OneThread::in_this_thread() { return scopes > 0; }

at::Tensor mm(const at::Tensor& a, const at::Tensor& b) {
  const OneThread one(is_small(a, b));
  return at::mm(a, b);
}

void mm_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  const OneThread one(is_small(a, b));
  at::mm_out(out, a, b);
}

at::Tensor addmm(const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b) {
  const OneThread one(is_small(a, b));
  return at::addmm(bias, a, b);
}

void bmm_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  const OneThread one(is_small(a, b));
  at::bmm_out(out, a, b);
}

void add_bmm(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  const OneThread one(is_small(a, b));
  sum.baddbmm_(a, b);
}

}  // namespace tessera::base
