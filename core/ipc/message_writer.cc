#include "core/ipc/message_writer.h"

namespace thalweg::ipc {

void Writer::Field(const BucketLayout& layout) {
  Field(layout.dtype);
  Field(static_cast<uint32_t>(layout.tensors.size()));
  for (const TensorSpec& tensor : layout.tensors) {
    Field(tensor.name);
    Field(static_cast<uint32_t>(tensor.shape.size()));
    for (const int64_t dim : tensor.shape) Field(dim);
  }
}

}  // namespace thalweg::ipc
