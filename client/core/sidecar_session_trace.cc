// This file writes a session's spans to the trace (docs/timeline.md).

#include "client/core/sidecar_session.h"

namespace thalweg {

void SidecarSession::TraceCopyIn(BucketId id, SessionBucket& bucket, TimePoint start) {
  const TimePoint end = Now();
  trace_.Work("copy_in", start, end, Describe(id, bucket));
  MutexLock lock(mutex_);
  bucket.filled = end;
}

TraceSubject SidecarSession::Describe(BucketId id, const SessionBucket& bucket) const {
  TraceSubject what;
  what.bucket = id;
  what.round = bucket.round;
  what.raw_bytes = bucket.elems * SizeOf(bucket.dtype);
  what.codec = options_.codec.ToString();
  return what;
}

}  // namespace thalweg
