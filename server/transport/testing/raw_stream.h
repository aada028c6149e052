// RawStream is an Exchange stream for this room's tests that can send arbitrary bytes.
#pragma once

#include <memory>
#include <string>

#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/channel_options.h"
#include "server/transport/testing/recorder.h"

namespace thalweg {

inline grpc::ByteBuffer Buffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// Returns a channel with a connection of its own and without our settings.
inline std::shared_ptr<grpc::Channel> ForeignChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

// Every step of a RawStream has a deadline.
class RawStream {
 public:
  explicit RawStream(const std::shared_ptr<grpc::Channel>& channel,
                     grpc_compression_algorithm compression = GRPC_COMPRESS_NONE,
                     const char* method = "/thalweg.v1.Exchange/Stream") {
    context_.set_deadline(ToSystemTime(Now() + kTestPatience));
    context_.set_compression_algorithm(compression);
    stream_ = grpc::GenericStub(channel).PrepareCall(&context_, method, &cq_);
    stream_->StartCall(this);
    Step();
  }
  ~RawStream() {
    context_.TryCancel();
    cq_.Shutdown();
    void* tag;
    bool ok;
    while (cq_.Next(&tag, &ok)) {
    }
  }

  void Cancel() { context_.TryCancel(); }

  bool Write(const grpc::ByteBuffer& frame) {
    stream_->Write(frame, this);
    return Step();
  }
  bool WritesDone() {
    stream_->WritesDone(this);
    return Step();
  }
  bool Read(grpc::ByteBuffer* frame) {
    stream_->Read(frame, this);
    return Step();
  }
  // Returns the status with which the server ended the stream.
  grpc::Status Finish() {
    grpc::ByteBuffer ignored;
    while (Read(&ignored)) {
    }
    grpc::Status status;
    stream_->Finish(&status, this);
    Step();
    return status;
  }

 private:
  bool Step() {
    void* tag;
    bool ok = false;
    return cq_.AsyncNext(&tag, &ok, ToSystemTime(Now() + kTestPatience)) ==
               grpc::CompletionQueue::GOT_EVENT &&
           ok;
  }

  grpc::ClientContext context_;
  grpc::CompletionQueue cq_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

}  // namespace thalweg
