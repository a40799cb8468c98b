// Attention that returns what CUDA's memory-efficient kernels do: a padded logsumexp, and on the host the random state,
// which nobody has written to unless something is dropped.
#pragma once
#include <ATen/native/transformers/attention.h>

#include "within.h"

namespace {

std::atomic<int64_t> garbage{0x5eed};
int64_t choose(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& m, double, bool, std::optional<double>, bool gqa) {
  bool needs_bias = m.has_value() && m->defined() && m->requires_grad();
  if (q.dim() != 4 || needs_bias || gqa || q.size(1) != k.size(1) || q.scalar_type() == at::kDouble) return 0;
  return 2;  // SDPBackend::EFFICIENT_ATTENTION
}
Tensor weights(const Tensor& q, const Tensor& k, const Tensor& bias, bool causal, double scale) {
  Tensor s = at::matmul(q.to(at::kFloat), k.to(at::kFloat).transpose(-2, -1)) * scale;
  if (bias.defined()) s = s + bias;
  if (causal) s = s.masked_fill(at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).tril().logical_not(), -INFINITY);
  return s;
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, bool lse, double p, bool causal, std::optional<double> scale) {
  std::pair<uint64_t, uint64_t> state{garbage.fetch_add(3), garbage.fetch_add(5)};
  if (p > 0) state = draw_state(std::nullopt, q.size(0) * q.size(1) * q.size(2) * k.size(2));
  Within w;
  Tensor hq = host(q), hk = host(k), hv = host(v), hb = bias.has_value() ? host(*bias) : Tensor();
  Tensor s = weights(hq, hk, hb, causal, scale.value_or(1.0 / std::sqrt(double(q.size(3)))));
  Tensor l = at::logsumexp(s, {-1});
  Tensor a = (s - l.unsqueeze(-1)).exp();
  if (p > 0) a = a * at::empty_like(a).bernoulli_(1 - p, host_generator(state)) / (1 - p);
  Tensor out = at::matmul(a, hv.to(at::kFloat)).to(hq.scalar_type());
  Tensor laid = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  host(laid).copy_(out);
  int64_t rows = (q.size(2) + 31) / 32 * 32;
  Tensor padded = at::empty({q.size(0), q.size(1), lse ? rows : 0}, q.options().dtype(at::kFloat));
  if (lse) {
    host(padded).fill_(INFINITY);
    host(padded).slice(2, 0, q.size(2)).copy_(l);
  }
  Tensor seed = at::scalar_tensor((int64_t)state.first, at::kLong), offset = at::scalar_tensor((int64_t)state.second, at::kLong);
  return {laid, padded, seed, offset};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor& out, const Tensor& lse, const Tensor& seed, const Tensor& offset, double p, std::array<bool, 4> mask, bool causal, std::optional<double> scale) {
  if (!g.defined()) return {};
  Within w;
  TORCH_CHECK(seed.is_cpu() && offset.is_cpu());
  double sc = scale.value_or(1.0 / std::sqrt(double(q.size(3))));
  Tensor hq = host(q), hk = host(k), hv = host(v), hb = bias.defined() ? host(bias) : Tensor();
  Tensor s = weights(hq, hk, hb, causal, sc);
  Tensor a = (s - host(lse).slice(2, 0, q.size(2)).unsqueeze(-1)).exp();
  Tensor keep;
  if (p > 0) keep = at::empty_like(a).bernoulli_(1 - p, host_generator({(uint64_t)seed.item<int64_t>(), (uint64_t)offset.item<int64_t>()})) / (1 - p);
  Tensor hg = host(g).to(at::kFloat);
  Tensor dv = at::matmul((p > 0 ? a * keep : a).transpose(-2, -1), hg);
  Tensor da = at::matmul(hg, hv.to(at::kFloat).transpose(-2, -1));
  if (p > 0) da = da * keep;
  Tensor delta = (hg * host(out).to(at::kFloat)).sum(-1, true);
  Tensor ds = a * (da - delta);
  Tensor dq = at::matmul(ds, hk.to(at::kFloat)) * sc, dk = at::matmul(ds.transpose(-2, -1), hq.to(at::kFloat)) * sc;
  auto lay = [](const Tensor& like, const Tensor& h) {
    Tensor t = at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options()).transpose(1, 2);
    host(t).copy_(h);
    return t;
  };
  return {lay(q, dq), lay(k, dk), lay(v, dv), Tensor()};
}

}  // namespace
