// A vector of int32 or int64 numbers in host memory, read alike.
#pragma once

#include "flash_attn/attention.h"

namespace flash_attn {

class Integers {
 public:
  Integers() = default;
  explicit Integers(const TensorView& t)
      : data_(t.given() ? t.data : nullptr), wide_(t.dtype == DType::i64), size_(t.given() ? t.sizes[0] : 0) {}

  bool given() const { return data_ != nullptr; }
  std::int64_t size() const { return size_; }
  std::int64_t operator[](std::int64_t i) const {
    return wide_ ? static_cast<const std::int64_t*>(data_)[i] : static_cast<const std::int32_t*>(data_)[i];
  }

 private:
  const void* data_ = nullptr;
  bool wide_ = false;
  std::int64_t size_ = 0;
};

}  // namespace flash_attn
