// Products of two matrices, on as many threads as pay off.
//
// MKL gives a second thread a part of even the smallest product. That saves a few microseconds at
// most; but where the other thread has no CPU at once, under other load, each product waits for a
// time slice (docs/launchers.md, Threads). Other libraries than MKL keep their own number of
// threads.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::base {

/// While it lives, MKL computes the products that this thread begins on this thread alone. For
/// fewer than a dozen rows that may change the last bit.
class OneThread {
 public:
  explicit OneThread(bool wanted);  ///< false: changes nothing
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  /// Whether this thread has one that is wanted.
  static bool in_this_thread();

 private:
  bool wanted_;
  int before_ = 0;
};

/// Return at::mm, at::mm_out and at::addmm (bias + a b), on one thread where the product is small.
at::Tensor mm(const at::Tensor& a, const at::Tensor& b);
void mm_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);
at::Tensor addmm(const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b);
/// Does at::bmm_out, on one thread where the products are small.
void bmm_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);
/// Does sum += a b for batches of matrices, as bmm_out.
void add_bmm(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);

}  // namespace tessera::base
