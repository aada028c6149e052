// FreeWith lets a unique_ptr end an object of a C library.
#pragma once

namespace thalweg {

// E.g. std::unique_ptr<X509, FreeWith<X509_free>>.
template <auto free>
struct FreeWith {
  template <typename T>
  void operator()(T* object) const {
    free(object);
  }
};

}  // namespace thalweg
