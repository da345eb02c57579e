"""What a run can show afterwards: a receipt, its proofs and signature, the chain of receipts; and what it must not."""
