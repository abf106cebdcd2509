// WeightGradStore: weight gradients that a backward leaves for later, so that the gradients of
// inputs, for which others wait, come first.
//
// What is put holds the inputs of its product (a layer's input and the gradient of its output)
// until run() forms it: that is the price. Tickets (sink.h) keep the units from being reduced
// before. One a model; threads as the sink. Source: zero-bubble schedules (arXiv 2401.10241), which
// split a backward in this way. Next: ../nn/linear.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>

#include "grad/sink.h"

namespace tessera::grad {

class WeightGradStore {
 public:
  /// Forms a raw gradient, shaped and typed as the backward would have given it.
  using Product = std::function<at::Tensor()>;

  explicit WeightGradStore(GradSink& sink) : sink_(sink) {}

  /// A backward begins: the next micro-batch, as errors name it, counted from 0 since run().
  void begin_micro_batch() { ++micro_batch_; }
  void put(SlotId slot, Product product);
  /// Forms what was put, oldest first, and hands it to the sink. Where a product throws, those
  /// after it stay owed.
  void run();
  /// Forgets everything (after an exception); the sink forgets the tickets.
  void drop();
  std::size_t size() const { return owed_.size(); }

 private:
  struct Owed {
    Ticket ticket;
    Product product;
  };
  GradSink& sink_;
  std::deque<Owed> owed_;
  std::int64_t micro_batch_ = -1;
};

}  // namespace tessera::grad
